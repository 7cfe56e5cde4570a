"""A torch-level graph that is more than one program: captured stages one after the other, eager ones between them.

Note [Why a graph is cut]

* It holds ops that no CUDA graph can hold, and ``on_uncapturable="split"``. They run eagerly, followed by autograd
  itself; what is before and after them is captured.
* One of its outputs feeds another one. In eager a user can hook the first, or differentiate the second with respect to
  it, for autograd goes through it. An autograd node that gives both does not lead back into itself, so there is one
  node up to the first output and one from there on.

What one stage gives is an ordinary input of the next: it has its history, and is copied into a static buffer.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

import passes
from passes.capturable_tensors import home_device
from passes.facts import describe_call, ops_of, output_args, overload_of, value_of, where_of
from passes.fakes import has_symbols
from passes.host_constants import beside_their_users, made_on_host
from passes.modes import take_out_switches
from passes.pipeline import copy_graph_module
from passes.split import Facts, assign_stages, calls_of_stages, feeding_outputs, split
from passes.values import refresh_values
from passes.verify_calls import NOT_ON_FAKES
from passes.views_again import make_views_again

from . import engines, fallback, trace
from .options import Options
from .program import ALIVE, Pools, Prepared, Program


@dataclasses.dataclass(frozen=True)
class Judged:
    """A torch-level graph as it is going to run, and what stands against capturing it.

    Attributes:
        graph: the user's passes have run over it.
        report: the rules' verdict on it.
        eager: the ops that have to run eagerly, and why (see :func:`_uncapturable`); with
            ``on_uncapturable="split"`` only.
    """

    graph: fx.GraphModule
    report: passes.Report
    eager: dict[fx.Node, str]

    @classmethod
    def of(cls, graph: fx.GraphModule, options: Options, ints_vary: bool = False) -> Judged:
        """Run the user's passes over a graph of Dynamo's, and judge what they give.

        Args:
            graph: the torch-level graph.
            options: those of the callable.
            ints_vary: whole numbers among the inputs are other ones at each call, so what reads them runs eagerly;
                else they may be sizes, and each is a capture of its own.
        Raises:
            PassError: (of :mod:`passes`) from a pass of the user's, which it names.
        """
        if options.passes:
            graph = _rewritten(graph, options.passes)
        report = trace.check_torch_level(graph)
        eager = _uncapturable(graph, report, ints_vary) if options.on_uncapturable == "split" else {}
        return cls(graph, report, eager)


def build(judged: Judged, specs: Sequence[trace.InputSpec], options: Options, name: str, pools: Pools) -> Built:
    """One program for the whole graph, or several stages; see Note [Why a graph is cut]."""
    return _Builder(options, name, pools).build(judged.graph, specs, judged.eager)


MAX_FAILURES = 8
"""How many failed captures of one graph lead to a cut around the op that failed; then its part runs eagerly."""


@dataclasses.dataclass
class _Builder:
    """Makes the programs of one graph, and what takes over from one of them where an op fails to be captured."""

    options: Options
    name: str
    pools: Pools
    failures: int = 0

    def build(self, graph: fx.GraphModule, specs: Sequence[trace.InputSpec], eager: dict[fx.Node, str]) -> Built:
        """One program for the whole graph, or several stages with the ops ``eager`` between them."""
        outputs = feeding_outputs(graph)
        if not eager and not outputs:
            return self.program(graph, specs, guarded=True)
        lifted, attributes = trace.lift_attributes(graph)
        lifted, after = copy_graph_module(lifted), trace.grad_mode_after(graph)
        renamed = dict(zip(ops_of(graph), ops_of(lifted), strict=True))
        reasons = {renamed[node]: reason for node, reason in eager.items()}
        outputs = [renamed[node] for node in outputs if node in renamed]
        take_out_switches(lifted)
        beside: dict[fx.Node, fx.Node] = {}
        if home_device(lifted.graph) is not None:
            beside = beside_their_users(lifted, made_on_host(lifted).difference(reasons))

        facts = Facts(lifted)

        def assign() -> dict[fx.Node, int]:
            found = assign_stages(lifted, reasons, outputs, facts)
            return {node: found[beside.get(node, node)] for node in found}

        stages = assign()
        sizes = collections.Counter(stages.values())
        captured = {node for node, stage in stages.items() if stage % 2 == 0}
        small = {node for node in captured if sizes[stages[node]] < self.options.min_region_ops}
        if small != captured:
            reasons = {**dict.fromkeys(small, ""), **reasons}
            stages = assign()
        elif any(reasons.values()):
            return self.program(graph, specs, guarded=True)  # which runs eagerly as a whole, and says why
        elif reasons:
            return EagerStage(graph, (), self.name, self.pools)
        if len(set(stages.values())) == 1:
            return self.program(graph, specs, guarded=True)
        make_views_again(stages, facts)
        return Stages(lifted, attributes, stages, reasons, specs, self, after)

    def program(self, graph: fx.GraphModule, specs: Sequence[trace.InputSpec], guarded: bool) -> Program:
        """A program that is cut where an op in it fails to be captured."""

        def around(origins: dict[str, str]) -> Stages | None:
            self.failures += 1
            eager = {node: reason for name, reason in origins.items() for node in _alike(graph, name)}
            if not eager or self.failures > MAX_FAILURES:
                return None
            built = self.build(graph, specs, eager)
            return built if isinstance(built, Stages) else None

        cut = around if self.options.on_uncapturable == "split" else None
        return Program(graph, specs, self.options, self.name, self.pools, guarded, cut)


def _alike(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """The op of that name; if it is somebody's own, all calls of it."""
    found = [node for node in ops_of(graph) if node.name == name]
    op = overload_of(found[0]) if found else None
    if op is None or op.namespace in ("aten", "prims"):
        return found
    return [node for node in ops_of(graph) if overload_of(node) is op]


def _rewritten(graph: fx.GraphModule, chosen: tuple[passes.AnyPass, ...]) -> fx.GraphModule:
    # A pass need not say which fake values its nodes have: on a graph of Dynamo's they can be made anew.
    rules = tuple(rule for rule in passes.WELL_FORMED if rule.id != "missing-fake-value")
    outputs = _looks(graph)
    for one in chosen:
        name = passes.pass_name(one)
        result = passes.Pipeline((one,), rules, on_changed=())(graph)
        graph = result.graph_module
        failed = refresh_values(graph) if result.modified else None
        if failed is not None and not isinstance(failed[1], NOT_ON_FAKES):
            node, error = failed
            problem = f"an op of the graph fails: {describe_call(node)} ({where_of(node)}): {trace.first_line(error)}"
            raise passes.PassError(name, "ensures", problem, diff=result.steps[0].diff) from error
        for position, (old, new) in enumerate(zip(outputs, _looks(graph), strict=True)):
            if old and new and old != new:
                raise passes.PassError(name, "ensures", f"output {position} is {new}, not {old}")
    return graph


def _looks(graph: fx.GraphModule) -> list[str]:
    """What each output is; empty where that depends on data or is not known."""
    values = [value_of(out) if isinstance(out, fx.Node) else None for out in output_args(graph)]
    return [_look(value) if isinstance(value, torch.Tensor) else "" for value in values]


def _look(tensor: torch.Tensor) -> str:
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        return ""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def _uncapturable(graph: fx.GraphModule, report: passes.Report, ints_vary: bool) -> dict[fx.Node, str]:
    """The ops of a torch-level graph that have to run eagerly, and why.

    Beside those that the rules name, these are the ops that take or give sizes and numbers that depend on data, or vary
    from call to call: each value would be a capture of its own. A float is an input of a graph only where it has been
    another one before. Empty where something else than an op (an input, say) is against a capture.
    """
    by_name = {node.name: node for node in ops_of(graph)}
    placeholders = graph.graph.find_nodes(op="placeholder")
    varying = {placeholders[i] for i in trace.wrapped_numbers(graph)}
    if ints_vary:
        varying |= {node for node in placeholders if has_symbols(value_of(node))}
    found: dict[fx.Node, str] = {}
    for violation in report.violations:
        node = by_name.get(violation.where.node or "")
        if node is None:
            return {}
        if varying.isdisjoint(node.all_input_nodes):
            found[node] = f"[{violation.id}] {violation.title}: {violation.observed} ({violation.where})"
    for node in by_name.values():
        if not varying.isdisjoint(node.all_input_nodes):
            found.setdefault(node, "")
            if not isinstance(value := value_of(node), torch.Tensor) or has_symbols(value):
                varying.add(node)
        elif node not in found and any(map(_depends_on_data, (node, *node.all_input_nodes))):
            found[node] = ""
    return found


def _depends_on_data(node: fx.Node) -> bool:
    return any(
        isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(leaf)
        for leaf in pytree.tree_leaves(value_of(node))
    )


class EagerStage:
    """Ops that run eagerly between captured stages. It has a program's counts."""

    def __init__(self, graph: fx.GraphModule, reasons: Sequence[str], name: str, pools: Pools) -> None:
        self.graph, self.name, self.pools = graph, name, pools
        self.captures: dict[Any, Any] = {}
        self.replays = 0
        self.reasons = tuple(dict.fromkeys(reasons))
        self.eager_reasons = collections.Counter(dict.fromkeys(self.reasons, 0))
        self._run = trace.for_eager(graph)
        ALIVE.add(self)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self.eager_reasons.update(self.reasons)
        return tuple(self._run(*inputs))

    def release(self) -> None:
        """Nothing is held."""


Built: TypeAlias = "Program | Stages | EagerStage"
"""What runs a torch-level graph; an `EagerStage` where numbers that vary leave nothing to be captured."""


class Stages:
    """Stages one after the other, called as the whole graph is."""

    def __init__(
        self,
        graph: fx.GraphModule,
        attributes: tuple[torch.Tensor, ...],
        stages: dict[fx.Node, int],
        reasons: dict[fx.Node, str],
        specs: Sequence[trace.InputSpec],
        builder: _Builder,
        grad_mode_after: bool | None,
    ) -> None:
        self._attributes, self._grad_mode_after = attributes, grad_mode_after
        name, pools = builder.name, builder.pools
        glue = split(graph, stages)
        known = dict(zip(glue.graph.find_nodes(op="placeholder"), specs, strict=False))
        eager: dict[int, list[str]] = collections.defaultdict(list)
        for op, reason in reasons.items():
            eager[stages[op]] += [reason] if reason else []
        self.stages: list[Program | EagerStage] = []
        targets: dict[str, Program | EagerStage] = {}
        for node, submodule in calls_of_stages(glue):
            number = int(str(node.target).removeprefix("submod_"))
            made: Program | EagerStage
            if number % 2:
                made = EagerStage(submodule, eager[number], name, pools)
            else:
                inputs = [known.get(arg, _passed_on(arg)) for arg in node.args if isinstance(arg, fx.Node)]
                made = builder.program(submodule, inputs, guarded=False)
            self.stages.append(made)
            targets[str(node.target)] = made
        self._steps = _straight(glue, targets)
        for reason in dict.fromkeys(reasons[op] for op in graph.graph.nodes if reasons.get(op)):
            fallback.warn(f"{name} is captured in parts: {reason}")

    @property
    def programs(self) -> list[Program]:
        """The captured stages, and those that have taken over from one."""
        return [part for stage in self.stages if isinstance(stage, Program) for part in stage.programs]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph's outputs for these inputs, equal to running it eagerly."""
        outputs = self._steps(_call, (*inputs, *self._attributes))
        if self._grad_mode_after is not None:
            torch.set_grad_enabled(self._grad_mode_after)
        return outputs

    def prepare(self, inputs: Sequence[Any]) -> Prepared:
        """Capture the forwards for these inputs; the samples of later stages are what the earlier ones give eagerly."""
        whole = Prepared()

        def step(stage: Program | EagerStage, given: Sequence[Any]) -> tuple[Any, ...]:
            part = stage.prepare(given) if isinstance(stage, Program) else Prepared(used=set(map(id, given)))
            whole.slots += part.slots
            whole.used |= part.used
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            with engines.for_tensors(tensors).unchanged(tensors):
                return tuple(trace.for_eager(stage.graph)(*given))

        self._steps(step, (*inputs, *self._attributes))
        return whole

    def release(self) -> None:
        """Give up all captures."""
        for stage in self.stages:
            stage.release()


def _call(stage: Program | EagerStage, given: Sequence[Any]) -> tuple[Any, ...]:
    return stage(*given)


def _passed_on(node: Any) -> trace.InputSpec:
    return trace.InputSpec(trace.InputKind.USER_INPUT, f"what {node} of the stage before gives")


Step = Callable[["Program | EagerStage", Sequence[Any]], "tuple[Any, ...]"]


def _straight(
    glue: fx.GraphModule, targets: dict[str, Program | EagerStage]
) -> Callable[[Step, Sequence[Any]], tuple[Any, ...]]:
    """The glue as a loop over numbered values."""
    number: dict[fx.Node, int] = {}
    calls: list[tuple[Program | EagerStage, list[int], list[tuple[int, int]]]] = []
    placeholders = glue.graph.find_nodes(op="placeholder")
    for node in placeholders:
        number[node] = len(number)
    for node, _ in calls_of_stages(glue):
        arguments = [number[arg] for arg in node.args if isinstance(arg, fx.Node)]
        gets = []
        for user in node.users:
            index = user.args[1]
            assert user.target is operator.getitem and isinstance(index, int), "stages return tuples"
            number[user] = len(number)
            gets.append((number[user], index))
        calls.append((targets[str(node.target)], arguments, gets))
    returned = output_args(glue)

    def run(step: Step, inputs: Sequence[Any]) -> tuple[Any, ...]:
        values: list[Any] = [*inputs, *[None] * (len(number) - len(inputs))]
        for stage, arguments, gets in calls:
            given = step(stage, [values[i] for i in arguments])
            for target, index in gets:
                values[target] = given[index]
        return tuple([values[number[leaf]] if isinstance(leaf, fx.Node) else leaf for leaf in returned])

    return run
