"""Nodes removed whose value nobody reads and whose effect nobody sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from .base import Pass
from .constraint import Constraint
from .effects import Effects, changes_metadata, is_pure, is_random, written_inputs
from .facts import is_aten
from .verify import AtenLevel, HasFakeValues


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Remove pure nodes without users, and writes into memory of the graph's own that nothing reads afterwards.

    Placeholders stay (they are the signature), random operators too (they move the generator), and so does what has an
    effect that nobody declares: custom and higher-order operators, asserts. As with torch's own elimination, an
    operator that would raise on bad data (an index out of range) is removed when its result is not used. Attributes
    that become unused stay on the module.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    def rewrite(self, gm: GraphModule) -> bool:
        """Erase the dead nodes and return whether there were any."""
        effects = Effects.of(gm)
        needed: set[int] = set(effects.aliases.outside)  # the storages that are read later, or outlive the call
        changed = False
        for node in reversed(list(gm.graph.nodes)):
            if not node.users and (is_pure(node) or _only_writes_into(node, needed, effects)):
                gm.graph.erase_node(node)
                changed = True
                continue
            for source in (node, *node.all_input_nodes):
                needed |= effects.storages(source)
        return changed


def _only_writes_into(node: Node, needed: set[int], effects: Effects) -> bool:
    """Whether all that ``node`` does is to write memory that is not among ``needed``."""
    if not is_aten(node) or changes_metadata(node) or is_random(node) or not is_pure_but_for_writes(node):
        return False
    written = written_inputs(node)
    return bool(written) and not any(effects.storages(source) & needed for source in written)


def is_pure_but_for_writes(node: Node) -> bool:
    """Return whether the writes that its schema declares are all that ``node`` does."""
    target = node.target
    return getattr(target, "namespace", "") in ("aten", "prims") and bool(written_inputs(node))
