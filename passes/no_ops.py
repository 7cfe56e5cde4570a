"""Views, casts and copies removed that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .base import Pass
from .constraint import Constraint
from .effects import Effects, changes_metadata, returned_objects
from .facts import schema_argument, value_of
from .verify import AtenLevel, HasFakeValues

# Operators whose result is their first argument, or a view of it with the same elements, where both have the same
# sizes and strides. `as_strided` is none of them: it may start elsewhere.
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "reshape_as", "expand", "expand_as"}
    | {"broadcast_to", "permute", "transpose", "t", "slice", "narrow", "squeeze", "flatten", "unflatten", "movedim"}
    | {"alias", "contiguous"}
)
_CASTS = frozenset({"to", "type_as"})
_COPIES = frozenset({"clone", "_to_copy"})
_DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})


@dataclass(frozen=True)
class RemoveNoOps(Pass):
    """Let the users of a view, cast or copy that changes nothing read what it was made from.

    A *view* or *cast* goes if its value has the sizes, strides, offset and dtype of its argument; dropout outside of
    training counts as one. A *copy* goes if that holds, nothing writes the copy, nothing writes the original while the
    copy is in use, and the copy does not leave the graph. Nodes that the graph returns stay, so that outputs remain
    the tensors that they were, and so does everything whose sizes or strides are changed in place. ``detach`` stays: it
    means something to autograd.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    def rewrite(self, gm: GraphModule) -> bool:
        """Replace the nodes and return whether there were any."""
        returned = returned_objects(gm.graph)
        changed = False
        effects = Effects.of(gm)
        for node in list(gm.graph.nodes):
            source = _unchanged_input(node)
            if source is None or node in returned or any(map(changes_metadata, (*node.users, *source.users))):
                continue
            is_copy = _name(node) in _COPIES or _is_forced(node)
            if is_copy and not _is_needless_copy(node, source, effects):
                continue
            effects.follow(node, source)
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            changed = True
        return changed


def _unchanged_input(node: Node) -> Node | None:
    """The argument of a view, cast, copy or dropout that its value has the elements, sizes and strides of, or None."""
    name = _name(node)
    if name not in _VIEWS | _CASTS | _COPIES | _DROPOUTS:
        return None
    if name in _DROPOUTS and _argument(node, "train") is not False:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    before, after = value_of(source), value_of(node)
    return source if _is_same_layout(before, after) and not _argument(node, "pin_memory") else None


def _is_same_layout(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
        return False
    if before.layout != torch.strided or before.dim() != after.dim() or before.is_conj() or before.is_neg():
        return False
    pairs = zip(
        (*before.shape, *before.stride(), before.storage_offset()),
        (*after.shape, *after.stride(), after.storage_offset()),
        strict=True,
    )
    return all(statically_known_true(one == other) for one, other in pairs)


def _is_needless_copy(copy: Node, source: Node, effects: Effects) -> bool:
    if effects.is_written(copy) or effects.escapes(copy):
        return False
    return not effects.written_between(source, effects.position[copy], effects.last_use(copy))


def _is_forced(node: Node) -> bool:
    """Whether a cast always copies."""
    return _argument(node, "copy") is True


def _name(node: Node) -> str | None:
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload) or op.namespace != "aten":
        return None
    return op._schema.name.partition("::")[2]


def _argument(node: Node, name: str) -> Any:
    return schema_argument(node, node.target, name) if isinstance(node.target, OpOverload) else None
