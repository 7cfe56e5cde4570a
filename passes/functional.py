"""Functional form: no operator writes, and inputs that the program changes are written back once, at the end."""

from __future__ import annotations

import collections
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from .aliasing import Aliases
from .base import Pass
from .constraint import Constraint, NodeConstraint, Satisfied, Verdict
from .effects import changes_metadata, written_inputs
from .facts import describe_call, value_of, where_of
from .fakes import fake_mode_of
from .lower import Arguments, Flat, flat_function, names_what_needs_data, replace_graph
from .verify import AtenLevel, HasFakeValues

aten = torch.ops.aten
_WRITE_BACKS = (aten.copy_.default, aten._foreach_copy_.default)


@dataclass(frozen=True)
class FunctionalForm(NodeConstraint):
    """The only nodes that write are copies into placeholders and attributes."""

    id: ClassVar[str] = "functional-form"
    title: ClassVar[str] = "a node writes memory"
    why: ClassVar[str] = "a graph can be reordered freely only if no value changes after it was made"
    hint: ClassVar[str] = "apply Functionalize; an operator that it leaves writes what its schema does not declare"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        written = written_inputs(node)
        is_write_back = node.target in _WRITE_BACKS and all(one.op in ("placeholder", "get_attr") for one in written)
        if not written or is_write_back:
            return Satisfied(self)
        names = ", ".join(one.name for one in written)
        return self.violation(where_of(node), f"{describe_call(node)} writes {names}", "write-backs into inputs only")


@dataclass(frozen=True)
class Functionalize(Pass):
    """Turn in-place operators into functional ones and write changed inputs and attributes back at the end.

    The work is that of ``torch.func.functionalize`` under ``make_fx``. What it loses is put back: an output that lies
    on the memory of a changed input is made again from the written-back input, so that it still does. Batch norm is
    called by the operator whose schema declares the running statistics. A graph that writes nothing is left as it is.

    Raises:
        ValueError: when run, if that would not give what the graph gives: sizes or strides are changed in place; two
            inputs share memory that is written; ``as_strided`` of memory that is written or made in
            the graph; an output would come
            out with other strides; numbers would be drawn in another order.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())
    ensures: ClassVar[tuple[Constraint[GraphModule], ...]] = (FunctionalForm(),)

    def rewrite(self, gm: GraphModule) -> bool:
        """Trace the functional form, if the graph is not in it, and return whether it was not."""
        if all(FunctionalForm().node_verdict(node) for node in gm.graph.nodes):
            return False
        arguments = Arguments.of(gm)
        with names_what_needs_data(self, gm):
            _refuse(gm, arguments)
            # Run as it is, for what each output is: a value of its own, or a part of the memory of an input.
            with fake_mode_of(arguments.flat):
                expected = pytree.tree_leaves(flat_function(gm, arguments)(*arguments.flat))
            replace_graph(gm, arguments, _functional, _Declared)
        _restore_aliases(gm, arguments, expected)
        return True


class _Declared(Interpreter):
    """Runs batch norm by the operator that says what it writes; functionalization goes by schemas."""

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.native_batch_norm.default and args[3] is not None and args[5] is True:
            target = aten._native_batch_norm_legit.default
        return super().call_function(target, args, kwargs)


def _functional(flat: Flat) -> Flat:
    return torch.func.functionalize(flat, remove="mutations")


def _refuse(gm: GraphModule, arguments: Arguments) -> None:
    aliases = Aliases.of(gm)
    written = {aliases.storage(one) for node in gm.graph.nodes for one in written_inputs(node)}
    for node in gm.graph.nodes:
        if changes_metadata(node) and node.target is not aten.detach_.default:
            raise ValueError(f"{node.name} changes sizes or strides in place, which no functional operator does")
        if node.target is aten.as_strided.default and aliases.storage(node) not in aliases.outside - written:
            raise ValueError(f"{node.name} reads memory by strides, which functional operators do not preserve")
        if node.target in (aten.bernoulli_.float, aten.bernoulli_.Tensor):
            value = value_of(node)
            if not value.is_contiguous():
                raise ValueError(
                    f"{node.name} draws into strides {tuple(value.stride())}, its functional form does not"
                )
    # Functionalization would change one of two inputs or attributes on the same memory, and not the other.
    holders = collections.Counter(_storage(value) for value in arguments.flat if isinstance(value, torch.Tensor))
    for home, value in zip(_homes(gm, arguments), arguments.flat, strict=True):
        if home is not None and holders[_storage(value)] > 1 and aliases.storage(home) in written:
            raise ValueError(f"two inputs share memory and the graph writes {home.name}, which is one of them")


def _homes(gm: GraphModule, arguments: Arguments) -> list[Node | None]:
    """The node of each value of ``arguments``; None for an attribute that the graph does not read."""
    attributes = {str(node.target): node for node in gm.graph.find_nodes(op="get_attr")}
    first = {id(value): attributes[name] for name, value in arguments.attributes.items() if name in attributes}
    return [
        *gm.graph.find_nodes(op="placeholder"),
        *(first.get(id(arguments.attributes[name])) for name in arguments.names),
    ]


def _restore_aliases(gm: GraphModule, arguments: Arguments, expected: list[Any]) -> None:
    """Let outputs that lay on the memory of a changed input lie there again, and refuse what is still not as it was.

    Args:
        gm: the functional graph.
        arguments: with which the original ran.
        expected: what the original gave, flat.
    """
    output = gm.graph.output_node()
    flat, spec = pytree.tree_flatten(output.args[0])
    homes = _homes(gm, arguments)
    copies = {node.args[0]: node for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    changed = {
        _storage(value): copies[home] for home, value in zip(homes, arguments.flat, strict=True) if home in copies
    }
    for position, value in enumerate(expected):
        if isinstance(value, torch.Tensor) and _storage(value) in changed:
            flat[position] = _part_of(changed[_storage(value)], value)
    output.args = (pytree.tree_unflatten(flat, spec),)
    got = [value_of(one) if isinstance(one, Node) else one for one in flat]
    for position, (one, other) in enumerate(zip(expected, got, strict=True)):
        if isinstance(one, torch.Tensor) and one.stride() != other.stride():
            raise ValueError(f"output {position} would have strides {other.stride()} instead of {one.stride()}")
    now = [value if home is None else value_of(home) for home, value in zip(homes, arguments.flat, strict=True)]
    if _sharing([*arguments.flat, *expected]) != _sharing([*now, *got]):
        raise ValueError("the outputs would not share memory as they do now")


def _sharing(values: list[Any]) -> list[int | None]:
    """For each tensor, the place of the first one on its storage."""
    storages = [_storage(value) for value in values]
    return [None if storage is None else storages.index(storage) for storage in storages]


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two places are known to be the same; their numbers may be symbolic, and no guard is added."""
    numbers, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(numbers) == len(others) and all(map(statically_known_true, map(operator.eq, numbers, others)))


def _part_of(copy: Node, value: torch.Tensor) -> Node:
    """The written-back input itself, or the view of it that has the place and the strides of ``value``."""
    whole = value_of(copy)
    place = (list(value.shape), list(value.stride()), value.storage_offset())
    if value.dtype == whole.dtype and _same(place, (list(whole.shape), list(whole.stride()), whole.storage_offset())):
        return copy
    if any(isinstance(number, torch.SymInt) for number in (*place[0], *place[1], place[2])):
        raise ValueError("an output is a view of a changed input of symbolic size")
    if value.dtype != whole.dtype:
        raise ValueError(f"an output is a view of a changed input as another dtype, {value.dtype}")
    with copy.graph.inserting_before(copy.graph.output_node()):
        view = copy.graph.call_function(aten.as_strided.default, (copy, *place))
    view.meta["val"] = aten.as_strided.default(whole, *place)
    return view
