"""Write-backs into several inputs made one operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from .base import Pass
from .constraint import Constraint
from .effects import Effects, written_inputs
from .facts import schema_argument, value_of
from .verify import AtenLevel, HasFakeValues

aten = torch.ops.aten


@dataclass(frozen=True)
class MergeInputCopies(Pass):
    """Turn several ``aten.copy_`` into inputs or attributes, their results unused, into one ``aten._foreach_copy_``.

    On a GPU that is one launch for many small tensors. Copies are merged where the one operator can stand at the place
    of the last of them: targets and sources have the same sizes and lie on one device, no two targets may share memory,
    no source may share memory with another's target, and no node in between touches a target or writes a source. Two
    inputs count as separate memory unless the graph itself says otherwise. One operator takes targets of one dtype and
    sources of one dtype: for others the GPU has no joint launch.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    def rewrite(self, gm: GraphModule) -> bool:
        """Merge the copies and return whether there were any to merge."""
        effects = Effects.of(gm)
        done: list[_Group] = []
        open_groups: dict[Any, _Group] = {}  # by dtypes
        for node in gm.graph.nodes:
            copied = _Copy.of(node, effects)
            for key, group in list(open_groups.items()):
                if copied is not None and key == copied.key and group.takes(copied):
                    continue
                if group.is_touched_by(node, effects):
                    done.append(open_groups.pop(key))
            if copied is not None:
                open_groups.setdefault(copied.key, _Group()).add(copied)
        merged = [group for group in (*done, *open_groups.values()) if len(group.copies) > 1]
        for group in merged:
            group.merge()
        return bool(merged)


@dataclass(frozen=True)
class _Copy:
    node: Node
    target: Node
    source: Node
    written: frozenset[int]
    read: frozenset[int]

    @property
    def key(self) -> tuple[torch.device, torch.dtype, torch.dtype]:
        """What copies have in common that one operator makes."""
        one, other = value_of(self.target), value_of(self.source)
        return one.device, one.dtype, other.dtype

    @classmethod
    def of(cls, node: Node, effects: Effects) -> _Copy | None:
        if node.target is not aten.copy_.default or node.users or schema_argument(node, node.target, "non_blocking"):
            return None
        target, source = node.args[:2]
        if not isinstance(target, Node) or target.op not in ("placeholder", "get_attr") or not isinstance(source, Node):
            return None
        one, other = value_of(target), value_of(source)
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None
        if one.device != other.device or [str(size) for size in one.shape] != [str(size) for size in other.shape]:
            return None
        return cls(node, target, source, frozenset(effects.storages(target)), frozenset(effects.storages(source)))


@dataclass
class _Group:
    copies: list[_Copy] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    def takes(self, copied: _Copy) -> bool:
        if not self.copies:
            return True
        return not (self.written & (copied.written | copied.read) or copied.written & self.read)

    def add(self, copied: _Copy) -> None:
        self.copies.append(copied)
        self.written |= copied.written
        self.read |= copied.read

    def is_touched_by(self, node: Node, effects: Effects) -> bool:
        if node.op == "output" or not self.copies:
            return False  # returning a target hands out its memory, whenever it was written
        touched: set[int] = set().union(*(effects.storages(source) for source in (node, *node.all_input_nodes)))
        written: set[int] = set().union(*(effects.storages(source) for source in written_inputs(node)))
        return bool(touched & self.written or written & self.read)

    def merge(self) -> None:
        last = self.copies[-1].node
        targets: Any = [copied.target for copied in self.copies]
        sources: Any = [copied.source for copied in self.copies]
        with last.graph.inserting_before(last):
            merged = last.graph.call_function(aten._foreach_copy_.default, (targets, sources))
        merged.meta = {key: last.meta[key] for key in ("stack_trace", "nn_module_stack") if key in last.meta}
        for copied in self.copies:
            last.graph.erase_node(copied.node)
