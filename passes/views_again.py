"""Views made again in the stage that changes their memory.

A captured stage that changes memory in place must know all that lies in it. What comes from another stage comes as a
tensor: two tensors of the same memory, of which one is changed, cannot be told apart from two others. So where a base
and its views, or several views, come into a stage that changes them, the stage takes the base alone and makes the views
itself. A view costs nothing; its memory, its values and its gradient are the same.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from .facts import tensors_of, value_of
from .split import IN_PLACE, Facts


def make_views_again(stages: dict[Node, int], facts: Facts) -> None:
    """Copy views into the captured stages (the even ones) that change their memory; ``stages`` gets the copies.

    Not of memory where an op changes a tensor's own sizes or strides (``t_``): the tensor itself has to be there.
    """
    reshaped = {storage for node in stages for storage in facts.reshaped(node)}
    changed: dict[int, set[int]] = {}
    for node, stage in stages.items():
        if stage % 2 == 0:
            changed.setdefault(stage, set()).update(facts.changed(node))
    for stage, of_stage in changed.items():
        storages = of_stage - reshaped
        inside = [node for node in stages if stages[node] == stage]
        coming = [
            source
            for source in dict.fromkeys(source for node in inside for source in node.all_input_nodes)
            if stages.get(source) != stage and facts.memory[source] & storages
        ]
        bases: dict[Node, list[Node]] = {}
        for source in coming:
            bases.setdefault(_steps_from_base(source, facts)[0], []).append(source)
        for base, views in bases.items():
            if len(views) > 1:
                for view in views:
                    _make_again(view, base, stage, stages, facts)


def _steps_from_base(node: Node, facts: Facts) -> tuple[Node, list[Node]]:
    """The tensor that a view is a view of, and the ops that make the view of it, in order."""
    steps: list[Node] = []
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not tensors_of(source):
            break
        if _is_changed_in_place(node):
            node = source
        elif _is_view(node, source, facts):
            steps.append(node)
            node = source
        else:
            break
    return node, steps[::-1]


def _is_view(node: Node, source: Node, facts: Facts) -> bool:
    if node.op == "call_function" and node.target is operator.getitem and isinstance(value_of(source), (tuple, list)):
        return True
    same = bool(facts.memory[node]) and facts.memory[node] == facts.memory[source]
    return same and node.op.startswith("call_") and node.all_input_nodes == [source] and not facts.changed(node)


def _is_changed_in_place(node: Node) -> bool:
    """Whether the op gives its first argument back."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.op == "call_function" and node.target in IN_PLACE and node.target is not operator.setitem


def _make_again(view: Node, base: Node, stage: int, stages: dict[Node, int], facts: Facts) -> None:
    users = [node for node in view.graph.nodes if stages.get(node) == stage and view in node.all_input_nodes]
    made = base
    with view.graph.inserting_before(users[0]):
        for step in _steps_from_base(view, facts)[1]:
            copied = view.graph.node_copy(step, {step.args[0]: made}.__getitem__)
            facts.memory[copied], stages[copied] = facts.memory[step], stage
            made = copied
    for user in users:
        user.replace_input_with(view, made)
