"""Outputs that alias made safe: each of the listed outputs ends up on memory of its own.

Note [Aliases of a node]
~~~~~~~~~~~~~~~~~~~~~~~~
Two values alias if a schema says so, or if their fake values lie on one storage. Neither alone is enough: a graph
traced on real tensors has fresh fake storages, and some operators alias without saying so (`_UNDECLARED`, composite
ones). A false alarm costs one copy; a miss would hand out memory that something else overwrites.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .base import Pass
from .constraint import Constraint
from .facts import constant_of, value_of
from .verify import AtenLevel, HasFakeValues

aten = torch.ops.aten

# Operators whose result may be their input or a view of it, although their schema does not say so.
_UNDECLARED = frozenset({"_unsafe_view", "lift"})
# Higher-order ops that give copies of what their op writes. Ops that return views of their inputs are never put in one:
# torch/_higher_order_ops/auto_functionalize.py, can_auto_functionalize.
_FUNCTIONAL = frozenset({"auto_functionalized", "auto_functionalized_v2"})


@dataclass(frozen=True)
class CloneAliasedOutputs(Pass):
    """Give each listed output of an ATen graph memory of its own, by an ``aten.clone`` where it has none.

    A listed output is cloned if it is a placeholder or an attribute, a view of one (through any chain of views and
    in-place ops), on the storage of a listed output before it, or if its elements overlap (an expanded tensor).
    Others stay as they are, so the pass changes nothing when it is run again. Outputs that are no tensors are
    skipped.

    The clone preserves the format: strides stay the same where the value is dense and does not overlap; otherwise, as
    `torch.clone` does, the result is dense with dimensions in the order of the strides. Values are unchanged.

    Attributes:
        outputs: positions among the graph's outputs, flattened, that must own their memory.

    Raises:
        TypeError: if ``outputs`` is no tuple or list of whole numbers.
        ValueError: if a position is negative; when run, if a position is not that of an output.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        given: object = self.outputs
        sequence = isinstance(given, (tuple, list))
        if not sequence or not all(isinstance(one, int) and not isinstance(one, bool) for one in self.outputs):
            raise TypeError(f"CloneAliasedOutputs takes a tuple of positions, such as (0,), not {given!r}")
        if negative := [position for position in self.outputs if position < 0]:
            raise ValueError(f"CloneAliasedOutputs counts outputs from 0, flattened; there are none at {negative}")
        object.__setattr__(self, "outputs", tuple(self.outputs))

    def rewrite(self, gm: GraphModule) -> bool:
        """Insert the clones and return whether there were any."""
        output = gm.graph.output_node()
        flat, spec = pytree.tree_flatten(output.args[0])
        wrong = [position for position in self.outputs if not 0 <= position < len(flat)]
        if wrong:
            raise ValueError(f"no outputs at {wrong}: the graph has {len(flat)}")
        aliases = Aliases.of(gm)
        claimed: set[int] = set()
        changed = False
        for position in sorted(set(self.outputs)):
            node = flat[position]
            value = _tensor_of(node)
            if value is None:
                continue
            storage = aliases.storage(node)
            if storage not in claimed and storage not in aliases.outside and not may_overlap(value):
                claimed.add(storage)
                continue
            flat[position] = _clone_before(output, node, value)
            changed = True
        if changed:
            output.args = (pytree.tree_unflatten(flat, spec),)
        return changed


@dataclass
class Aliases:
    """Which nodes of a graph may lie on one storage: see Note [Aliases of a node].

    Attributes:
        outside: the storages (as `storage` numbers them) of placeholders and attributes.
    """

    outside: set[int] = field(default_factory=set)
    _parent: dict[object, object] = field(default_factory=dict)
    _number: dict[object, int] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: GraphModule) -> Aliases:
        """Return the aliases within ``gm``."""
        aliases = cls()
        for node in gm.graph.nodes:
            for source in _aliased_inputs(node):
                aliases.join(node, source)
            if node.target is operator.getitem and isinstance(node.args[1], int):
                aliases.join(node, ("element", *node.args))  # the same element may be taken twice
            value = value_of(node)
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                aliases.join(node, ("storage", value.untyped_storage()._cdata))
        aliases.outside = {aliases.storage(node) for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")}
        return aliases

    def storage(self, node: Node) -> int:
        """Return a number that is equal for nodes that may share memory."""
        return self._number.setdefault(self._find(node), len(self._number))

    def _find(self, item: object) -> object:
        while (parent := self._parent.get(item, item)) is not item:
            item = parent
        return item

    def join(self, one: object, other: object) -> None:
        """Record that two nodes, or other keys for memory, may share memory."""
        first, second = self._find(one), self._find(other)
        if first is not second:
            self._parent[first] = second


def may_overlap(value: torch.Tensor) -> bool:
    """Return whether two elements of ``value`` may share an address: True unless its strides rule it out."""
    dims = [(stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if not _is(size == 1)]
    if any(_is(size == 0) for _, size in dims):
        return False
    reach: Any = 0  # the largest offset that the dimensions with smaller strides can reach
    remaining = dims
    while remaining:
        # Sizes may be symbolic, so the next stride is picked by what is known rather than by sorting.
        following = next((dim for dim in remaining if all(_is(dim[0] <= other[0]) for other in remaining)), None)
        if following is None or not _is(following[0] > reach):
            return True
        reach = reach + (following[1] - 1) * following[0]
        remaining = [dim for dim in remaining if dim is not following]
    return False


def _is(condition: Any) -> bool:
    """Whether a condition on sizes, which may be symbolic, is known to hold; no guard is added."""
    return statically_known_true(condition)


def _aliased_inputs(node: Node) -> list[Node]:
    """The inputs whose memory the value of ``node`` may share; ``node`` may be an element of another's value."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        source = node.args[0]
        return shared_with_return(source, node.args[1]) if isinstance(node.args[1], int) else [source]
    if isinstance(value_of(node), (tuple, list)):
        return []  # its elements are followed one by one
    return shared_with_return(node, 0)


def shared_with_return(node: Node, position: int) -> list[Node]:
    """Return the inputs that return number ``position`` of ``node`` may alias; a returned list counts as one return."""
    op = node.target
    if isinstance(op, HigherOrderOperator):
        return [] if op.name() in _FUNCTIONAL else list(node.all_input_nodes)
    if not isinstance(op, OpOverload):
        return []
    if op._schema.name.partition("::")[2] in _UNDECLARED or _is_composite(op):
        return list(node.all_input_nodes)
    returns = op._schema.returns
    declared = returns[position if len(returns) > 1 else 0].alias_info if returns else None
    if declared is None:
        return []
    names = set(declared.before_set) | set(declared.after_set)  # empty for a list: it names its elements only
    shared: list[Node] = []
    for index, parameter in enumerate(op._schema.arguments):
        own = set() if parameter.alias_info is None else set(parameter.alias_info.before_set)
        if parameter.alias_info is not None and (not names or not own or names & own):
            given = node.kwargs.get(parameter.name, node.args[index] if index < len(node.args) else None)
            shared.extend(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Node))
    return shared


def _is_composite(op: OpOverload) -> bool:
    """Whether the op is written in terms of others, and so may give back an input, as ``dropout`` may."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _tensor_of(node: Any) -> torch.Tensor | None:
    """The tensor that an output stands for, fake where there is one; None for an output that is no tensor."""
    value = value_of(node) if isinstance(node, Node) else None
    if value is None and isinstance(node, Node):
        value = constant_of(node)
    return value if isinstance(value, torch.Tensor) else None


def _clone_before(output: Node, node: Node, value: torch.Tensor) -> Node:
    with output.graph.inserting_before(output):
        clone = output.graph.call_function(aten.clone.default, (node,))
    clone.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    modes = (known.fake_mode for known in map(value_of, output.graph.nodes) if isinstance(known, FakeTensor))
    mode = value.fake_mode if isinstance(value, FakeTensor) else next(modes, None)
    with torch.no_grad(), nullcontext() if mode is None else mode:
        fake = value if mode is None or isinstance(value, FakeTensor) else mode.from_tensor(value)
        clone.meta["val"] = aten.clone.default(fake)
    return clone
