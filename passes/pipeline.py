"""The driver of passes: it verifies before the first and after each one, times them, and says which one is guilty."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils import _pytree as pytree

from .base import MALFORMED, Pass, PassError
from .constraint import Constraint, NodeConstraint, Report, Violation, as_graph_module, judge
from .facts import describe_callable, is_library_file, value_of
from .show import diff, show, show_value
from .verify import WELL_FORMED, Lint
from .verify_calls import ON_CHANGED

AnyPass: TypeAlias = Pass | PassBase | Callable[[GraphModule], Any]
"""A pass of ours, one of torch.fx (`PassBase`), or a function of a GraphModule that returns one, a `PassResult`, or
None for a change in place. A function recompiles what it changes; after a `PassBase` it is done, as torch's own
`PassManager` does.
"""


_TABLES = (
    *("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


@dataclass(frozen=True)
class Step:
    """What one pass did.

    Attributes:
        name: the pass with its options.
        modified: whether the graph's text changed.
        seconds: wall time of the pass, verification not included.
        diff: unified diff of the graph's text; empty if unchanged.
    """

    name: str
    modified: bool
    seconds: float
    diff: str


@dataclass(frozen=True)
class PipelineResult:
    """The rewritten graph and what each pass did to it."""

    graph_module: GraphModule
    steps: tuple[Step, ...]

    @property
    def modified(self) -> bool:
        """Whether any pass changed the graph."""
        return any(step.modified for step in self.steps)

    def __str__(self) -> str:
        """One line per pass: what it did and how long it took in milliseconds."""
        words = {True: "changed", False: "unchanged"}
        rows = (f"{step.seconds * 1e3:8.2f} ms  {words[step.modified]:<9}  {step.name}" for step in self.steps)
        return "\n".join(rows)


@dataclass(frozen=True)
class Pipeline:
    """A sequence of passes, itself callable.

    The graph that is given is left untouched: passes work on a copy that shares its parameters, buffers and submodules.

    Attributes:
        passes: run in this order.
        constraints: judged before the first pass and after each.
        on_changed: judged after each pass, on the nodes that it made or changed.
        keeps_interface: whether a pass must leave the names and order of the inputs, and how the outputs are nested.

    Raises:
        TypeError: if ``passes`` is no sequence of passes, or holds a class in the place of a pass.
    """

    passes: tuple[AnyPass, ...]
    constraints: tuple[Constraint[GraphModule], ...] = WELL_FORMED
    on_changed: tuple[NodeConstraint, ...] = ON_CHANGED
    keeps_interface: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", passes_of(self.passes))

    def __call__(self, gm: GraphModule) -> PipelineResult:
        """Run the passes over a copy of ``gm``.

        Raises:
            PassError: naming the guilty pass, with the violations and its diff. If a pass raised an exception, that
                is the ``__cause__``.
            TypeError: if ``gm`` is no GraphModule.
        """
        report = judge(as_graph_module(gm), self.constraints)
        if not report:
            raise PassError("input", "verify", "the graph is malformed before the first pass", report)
        current, steps = copy_graph_module(gm), []
        for one in self.passes:
            current, step = self._step(one, current)
            steps.append(step)
        return PipelineResult(current, tuple(steps))

    def _step(self, one: AnyPass, gm: GraphModule) -> tuple[GraphModule, Step]:
        name, before, calls, interface = pass_name(one), show(gm), _calls(gm), _interface(gm)
        start = time.perf_counter()
        try:
            returned = one(gm)
        except PassError as error:
            problem, change = error.problem, _change(before, gm, name)
            raise PassError(error.pass_name, error.stage, problem, error.report, change, error.hint) from error
        except Exception as error:
            problem, change = f"raised {type(error).__name__}: {error}", _change(before, gm, name)
            place = _place_of(error)
            hint = f"it comes from {place}; correct the pass, or leave it out" if place else "leave the pass out"
            if not place and isinstance(error, ValueError):
                hint = ""  # that a graph is not what the pass works on: the words say why
            raise PassError(name, "run", problem, diff=change, hint=hint) from error
        seconds = time.perf_counter() - start
        result = _graph_module(name, gm, returned)
        try:
            if isinstance(one, PassBase) and Lint().verdict(result):
                result.recompile()
            change, report = diff(before, show(result), name), self._judge(result, calls)
        except Exception as error:  # whatever torch makes of an object that is no longer what it takes it for
            problem = f"the graph cannot be read after this pass: {type(error).__name__}: {error}"
            raise PassError(
                name, "verify", problem, hint="change nodes by their methods and properties only"
            ) from error
        if not report:
            raise PassError(name, "verify", MALFORMED, report, change)
        if self.keeps_interface and interface is not None and (found := _interface(result)) != interface:
            problem = f"the graph takes and gives {_in_words(found)}, not {_in_words(interface)} as before"
            hint = "keep the inputs and outputs, or say Pipeline(..., keeps_interface=False)"
            raise PassError(name, "verify", problem, diff=change, hint=hint)
        return result, Step(name, bool(change), seconds, change)

    def _judge(self, gm: GraphModule, calls: dict[str, tuple[object, ...]]) -> Report:
        """The verdict on what a pass made of a graph with these calls."""
        report = judge(gm, self.constraints)
        if not report:  # then values may not be what they seem
            return report
        changed = [node for node in gm.graph.nodes if calls.get(node.name) != _call(node)]
        verdicts = (rule.node_verdict(node) for rule in self.on_changed for node in changed)
        return Report(tuple(verdict for verdict in verdicts if isinstance(verdict, Violation)))


def apply(gm: GraphModule, passes: Iterable[AnyPass]) -> GraphModule:
    """Return a rewritten copy of ``gm`` that shares its parameters and buffers; ``gm`` itself is left untouched.

    Raises:
        PassError, TypeError: see `Pipeline`. That a pass changes the inputs or outputs is an error, too; a `Pipeline`
            with ``keeps_interface=False`` lets it.
    """
    return Pipeline(passes_of(passes))(gm).graph_module


def passes_of(given: object) -> tuple[AnyPass, ...]:
    """Return passes as a tuple.

    Raises:
        TypeError: if ``given`` is no iterable of passes, or holds a class in the place of a pass.
    """
    if isinstance(given, (str, Pass, PassBase)) or not isinstance(given, Iterable):
        raise TypeError(f"passes are given in a sequence, not as {_described(given)}: write [one] for one pass")
    passes = tuple(given)
    for one in passes:
        if isinstance(one, type) and issubclass(one, (Pass, PassBase)):
            raise TypeError(f"{one.__qualname__} is a class of passes, not a pass: write {one.__qualname__}(...)")
        if not callable(one):
            raise TypeError(f"{_described(one)} is no pass: expected a Pass, a PassBase or a function of a GraphModule")
    return passes


def copy_graph_module(gm: GraphModule) -> GraphModule:
    """Return a GraphModule with its own copy of the graph on the same parameters, buffers and submodules.

    Metadata of nodes and code generation are copied too.
    """
    graph = Graph(tracer_cls=getattr(gm.graph, "_tracer_cls", None))
    copied_nodes: dict[Node, Node] = {}
    returned = graph.graph_copy(gm.graph, copied_nodes)
    if gm.graph.find_nodes(op="output"):  # what it returns may be None
        graph.output(returned).meta = dict(gm.graph.output_node().meta)
    graph.set_codegen(gm.graph._codegen)
    copied = GraphModule(gm, graph, class_name=type(gm).__name__.removesuffix("Impl"))
    copied.meta.update(gm.meta)
    copied.training = gm.training  # not train(), which would reach into the shared submodules
    for table in _TABLES:  # GraphModule takes over only what the graph names
        own = getattr(copied, table)
        own.update({name: value for name, value in getattr(gm, table).items() if name not in own})
    copied._non_persistent_buffers_set |= gm._non_persistent_buffers_set
    registered = {name for table in (copied._parameters, copied._buffers, copied._modules) for name in table}
    for name, value in vars(gm).items():
        if name not in registered:  # a plain attribute would hide what GraphModule has made a buffer
            vars(copied).setdefault(name, value)
    return copied


def pass_name(one: AnyPass) -> str:
    """Return the name of a pass in messages: ours with its options, torch.fx's by class, a function by its own name."""
    if isinstance(one, Pass):
        return one.name
    if isinstance(one, PassBase):
        return type(one).__qualname__
    return describe_callable(one)


def _described(given: object) -> str:
    return f"{given!r} of type {type(given).__qualname__}"


def _calls(gm: GraphModule) -> dict[str, tuple[object, ...]]:
    """What each node calls, on what, and its fake value, by name."""
    return {node.name: _call(node) for node in gm.graph.nodes}


def _change(before: str, gm: GraphModule, name: str) -> str:
    """What a pass that raised had changed."""
    try:
        return diff(before, show(gm), name)
    except Exception:  # as in `_step`: the graph cannot be read, and what the pass raised says more
        return ""


def _call(node: Node) -> tuple[object, ...]:
    return node.op, node.target, str(node.args), str(node.kwargs), show_value(value_of(node))


_Interface: TypeAlias = tuple[tuple[str, ...], pytree.TreeSpec]


def _interface(gm: GraphModule) -> _Interface | None:
    """The names of the inputs and how the outputs are nested; None where there is no one output."""
    outputs = gm.graph.find_nodes(op="output")
    if len(outputs) != 1:
        return None
    names = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return names, pytree.tree_structure(outputs[0].args[0])


def _in_words(interface: _Interface | None) -> str:
    if interface is None:
        return "nothing"
    names, outputs = interface
    given = "1 output" if outputs.num_leaves == 1 else f"{outputs.num_leaves} outputs"
    taken = f"the inputs {', '.join(names)}" if names else "no inputs"
    return f"{taken} and {given} in {pytree.treespec_pprint(outputs)}"


def _place_of(error: BaseException) -> str:
    """The line of the user's at which a pass raised; empty where all of it is torch's or of this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""


def _graph_module(name: str, given: GraphModule, returned: Any) -> GraphModule:
    if returned is None:
        return given
    result = returned.graph_module if isinstance(returned, PassResult) else returned
    if not isinstance(result, GraphModule):
        problem = f"returned {type(result).__name__}, expected a GraphModule, a PassResult or None"
        raise PassError(name, "run", problem, hint="return the GraphModule, or nothing for a change in place")
    return result
