"""A graph of any tracer turned into one of ATen operators with fake values, which is what the rewrites work on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.fx.traceback import preserve_node_meta
from torch.nn.utils import stateless

from .base import Pass, PassError
from .capturable_ops import DataDependentShape, HostSync
from .constraint import Constraint, judge
from .facts import constant_of, value_of
from .fakes import failures_unlogged, fake, fake_mode_of, has_symbols
from .verify import AtenLevel

_NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)
_LIFT = torch.ops.aten.lift_fresh_copy.default

Flat = Callable[..., Any]
"""A function of the graph's placeholders, flat, followed by its attributes (see `Arguments.flat`)."""


@dataclass(frozen=True)
class LowerToAten(Pass):
    """Replace a graph by the ATen operators that it runs, with a fake value on each node.

    Works on graphs of symbolic_trace, Dynamo, torch.export and make_fx; calls of modules are taken apart, parameters
    and buffers stay attributes under their names. In-place operators stay in-place (`Functionalize` removes them). What
    the graph does to autograd (``detach``, ``no_grad``) is not kept: the result is for use below autograd. Shapes,
    devices and the state of autocast are those of the tracing; the checks of inputs that torch.export inserts are gone.

    Attributes:
        inputs: example values of the placeholders, in order, of which only the metadata matters. Not needed where the
            placeholders carry fake values, as those of Dynamo, make_fx and torch.export do, and not used where these
            have symbols as sizes, which stay.

    Raises:
        TypeError: if ``inputs`` is no tuple or list.
        ValueError: when run, if a placeholder has neither a fake value nor an example, the numbers of examples and
            placeholders differ, or the example of a tensor is none.
        PassError: when run, if what an op gives depends on data, which fake values do not have.
    """

    ensures: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(),)

    inputs: tuple[Any, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, GraphModule):
            raise TypeError("LowerToAten takes example inputs first, then the graph: LowerToAten(inputs)(gm)")
        if self.inputs is not None and not isinstance(self.inputs, (tuple, list)):
            kind = type(self.inputs).__qualname__
            raise TypeError(f"LowerToAten takes a tuple of example inputs, not {kind}: write LowerToAten((x,)) for one")
        object.__setattr__(self, "inputs", None if self.inputs is None else tuple(self.inputs))

    def rewrite(self, gm: GraphModule) -> bool:
        """Trace ``gm`` anew; it counts as changed if the text of the code or the values on the nodes are others."""
        before = gm.code, [value_of(node) is None for node in gm.graph.nodes]
        with names_what_needs_data(self, gm):
            replace_graph(gm, Arguments.of(gm, self.inputs, keeps_grad=True))
            for node in reversed(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)):
                if not node.users:  # what autograd would have saved
                    gm.graph.erase_node(node)
        return before != (gm.code, [value_of(node) is None for node in gm.graph.nodes])


@contextlib.contextmanager
def names_what_needs_data(one: Pass, gm: GraphModule) -> Iterator[None]:
    """While ``gm`` is run on fake values inside: say which op it is that cannot be."""
    try:
        with failures_unlogged():
            yield
    except _NEEDS_DATA as error:
        report = judge(gm, (HostSync(), DataDependentShape()))
        if report.ok:
            raise
        raise PassError(one.name, "requires", "the graph cannot be run on fake values", report) from error


@dataclass(frozen=True)
class Arguments:
    """Fake values for one run of a graph.

    Attributes:
        inputs: of the placeholders, in order.
        attributes: of the tensors that are attributes, by name; one that has two names is there twice.
    """

    inputs: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, gm: GraphModule, inputs: tuple[Any, ...] | None = None, keeps_grad: bool = False) -> Arguments:
        """Return fake values from ``inputs``, by default from those that the placeholders carry.

        With ``keeps_grad`` those of tensors that require grad do so too: ``matmul`` chooses its kernels by that.

        Raises:
            ValueError: see `LowerToAten`.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        carried = [value_of(node) for node in placeholders]
        given = carried if inputs is None else list(inputs)
        if len(given) != len(placeholders):
            raise ValueError(f"{len(given)} inputs for {len(placeholders)} placeholders")
        for node, value in zip(placeholders, given, strict=True):
            if isinstance(value_of(node), torch.Tensor) and not isinstance(value, torch.Tensor):
                raise ValueError(f"{node.name} is a tensor, and its example is {value!r}")
        missing = [node.name for node, value in zip(placeholders, given, strict=True) if value is None]
        if missing and inputs is None:
            raise ValueError(f"no fake values on {', '.join(missing)}: give example inputs")
        if any(map(has_symbols, carried)):  # examples would make numbers of them, and the graph wrong for others
            given = carried
        mode = fake_mode_of(given)
        named = {str(node.target): constant_of(node) for node in gm.graph.find_nodes(op="get_attr")}
        named = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        for tensors in (gm.named_parameters(remove_duplicate=False), gm.named_buffers(remove_duplicate=False)):
            named.update(tensors)

        def make(value: Any) -> Any:
            requires_grad = keeps_grad and isinstance(value, torch.Tensor) and value.requires_grad
            return fake(value, mode).requires_grad_() if requires_grad else fake(value, mode)

        made: dict[int, Any] = {}  # the same fake value for a tensor that has two names
        for value in named.values():
            if id(value) not in made:
                made[id(value)] = make(value)
        return cls(tuple(map(make, given)), {key: made[id(one)] for key, one in named.items()})

    @property
    def names(self) -> list[str]:
        """The first name of each attribute."""
        first: dict[int, str] = {}
        for name, value in self.attributes.items():
            first.setdefault(id(value), name)
        return list(first.values())

    @property
    def flat(self) -> tuple[Any, ...]:
        """The values of the placeholders, then those of `names`."""
        return (*self.inputs, *(self.attributes[name] for name in self.names))

    def with_values(self, flat: tuple[Any, ...]) -> Arguments:
        """Return arguments that hold other values, given in the order of `flat`."""
        count = len(self.inputs)
        new = {id(self.attributes[name]): value for name, value in zip(self.names, flat[count:], strict=True)}
        return Arguments(flat[:count], {name: new[id(value)] for name, value in self.attributes.items()})


def flat_function(gm: GraphModule, arguments: Arguments, interpreter: type[Interpreter] = Interpreter) -> Flat:
    """Return ``gm`` as a function of values in the order of `Arguments.flat`."""

    def run(*flat: Any) -> Any:
        given = arguments.with_values(flat)
        # A graph may switch autograd on and off; what it leaves must not outlast the tracing.
        with torch.set_grad_enabled(torch.is_grad_enabled()), stateless._reparametrize_module(gm, given.attributes):
            return interpreter(gm).run(*given.inputs, enable_io_processing=False)

    return run


def replace_graph(
    gm: GraphModule,
    arguments: Arguments,
    transform: Callable[[Flat], Flat] = lambda flat: flat,
    interpreter: type[Interpreter] = Interpreter,
) -> None:
    """Trace ``transform`` of ``gm`` on fake values and put the result in the place of the graph of ``gm``.

    Placeholders keep their names and order, attributes become ``get_attr`` nodes again, calling conventions stay.
    """
    lifts = gm.graph.find_nodes(op="call_function", target=_LIFT)
    lifted = {source.target for node in lifts for source in node.all_input_nodes}
    function = transform(flat_function(gm, arguments, interpreter))
    with preserve_node_meta(), fake_mode_of(arguments.flat), _dispatcher_for(arguments.flat):
        traced = make_fx(function)(*arguments.flat)
    graph = Graph()
    copied: dict[Node, Node] = {}
    old = gm.graph.find_nodes(op="placeholder")
    new = list(traced.graph.find_nodes(op="placeholder"))
    for origin, node in zip(old, new, strict=False):  # behind them come the attributes
        copied[node] = graph.placeholder(str(origin.target))
        copied[node].args = origin.args  # a default value
        copied[node].meta = {**origin.meta, **node.meta}
        copied[node].meta.setdefault("val", value_of(origin))
    for name, node in zip(arguments.names, new[len(old) :], strict=True):
        if node.users:
            copied[node] = graph.get_attr(name)
            copied[node].meta = _value_only(node)
    for node in traced.graph.find_nodes(op="get_attr"):  # what tracing itself made or found, such as a literal
        _keep_constant(gm, traced, node, graph, copied)
    for node in traced.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            copied[node] = graph.node_copy(node, copied.__getitem__)
            sources = copied[node].all_input_nodes
            if node.target is torch.ops.aten.clone.default and sources[0].target in lifted:
                copied[node].target = _LIFT  # functionalization calls it a clone; that it is of a literal is worth more
    returned = traced.graph.output_node()
    graph.output(torch.fx.map_arg(returned.args[0], copied.__getitem__)).meta = dict(gm.graph.output_node().meta)
    graph.set_codegen(gm.graph._codegen)
    gm.graph = graph


def _dispatcher_for(values: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """Python's dispatcher where sizes are symbols, as in make_fx: in C++ some in-place ops take numbers alone."""
    return enable_python_dispatcher() if any(map(has_symbols, values)) else contextlib.nullcontext()


def _keep_constant(gm: GraphModule, traced: GraphModule, node: Node, graph: Graph, copied: dict[Node, Node]) -> None:
    value = getattr(traced, str(node.target))
    name = next((name for name, tensor in gm.named_buffers(remove_duplicate=False) if tensor is value), None)
    if name is None:
        name = free_name(gm, str(node.target))
        if isinstance(value, torch.Tensor):
            gm.register_buffer(name, value, persistent=False)
        else:
            setattr(gm, name, value)
    copied[node] = graph.get_attr(name)
    copied[node].meta = _value_only(node)


def _value_only(node: Node) -> dict[str, Any]:
    """The metadata of an attribute: an attribute is of no place in the user's code."""
    return {"val": node.meta["val"]} if "val" in node.meta else {}


def free_name(gm: GraphModule, base: str) -> str:
    """Return a name, made from ``base``, that no attribute of ``gm`` has."""
    base = base.replace(".", "_")
    names = (base if index == 0 else f"{base}_{index}" for index in itertools.count())
    return next(name for name in names if not hasattr(gm, name))
