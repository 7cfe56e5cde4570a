"""Constants on the CPU in a torch-level graph of another device: what `MoveConstantsToDevice` may move later on.

In a torch-level graph a call may do more than compute, so only the ATen graph shows whether a constant can be moved.
Here they are found, so that rules can leave them to that graph, and kept beside what reads them where a graph is cut.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from .facts import ops_of, tensors_of
from .split import changed_memory, may_draw

_CPU = torch.device("cpu")


def made_on_host(gm: GraphModule) -> set[Node]:
    """Return the calls whose tensors are on the CPU and follow from no input, attribute or random number.

    What something writes in place is none of them.
    """
    changed = changed_memory(gm)
    found: set[Node] = set()
    for node in ops_of(gm):
        tensors = tensors_of(node)
        on_host = bool(tensors) and all(tensor.device == _CPU for tensor in tensors)
        if on_host and found.issuperset(node.all_input_nodes) and not may_draw(node) and node not in changed:
            found.add(node)
    return found


def concerns_only(node: Node, constants: Collection[Node]) -> bool:
    """Return whether all CPU tensors that a call reads or gives come from ``constants``."""
    return all(
        one in constants for one in (node, *node.all_input_nodes) for tensor in tensors_of(one) if tensor.device == _CPU
    )


def beside_their_users(gm: GraphModule, constants: Collection[Node]) -> dict[Node, Node]:
    """Give each call that reads constants copies of its own, right before it.

    Args:
        gm: changed in place; the caller recompiles.
        constants: calls that compute something from each other and from nothing else.
    Returns:
        The copies, each with the call that it is for. What the graph returns stays where it is.
    """
    user_of: dict[Node, Node] = {}

    def copy(constant: Node, user: Node, made: dict[Node, Node]) -> Node:
        if constant not in made:
            for source in constant.all_input_nodes:
                copy(source, user, made)
            with gm.graph.inserting_before(user):
                made[constant] = gm.graph.node_copy(constant, made.__getitem__)
            user_of[made[constant]] = user
        return made[constant]

    for user in [node for node in ops_of(gm) if node not in constants]:
        made: dict[Node, Node] = {}
        for source in [source for source in user.all_input_nodes if source in constants]:
            user.replace_input_with(source, copy(source, user, made))
    for node in reversed(ops_of(gm)):
        if node in constants and not node.users:
            gm.graph.erase_node(node)
    return user_of
