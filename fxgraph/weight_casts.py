"""Casts that autocast makes once: eager keeps the cast of a leaf and uses it again, a trace casts at every use.

``cached_cast`` in ``aten/src/ATen/autocast_mode.cpp`` keeps the lower-precision copy of a float32 leaf that requires
grad until the outermost autocast context is left. So the gradients of all its uses are added in the lower precision,
and the sum is cast back once. Traced tensors are no leaves, and ``make_fx`` switches the cache off, so a joint graph
has one cast per use and adds the gradients in float32: other roundings than eager's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

_CAST = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor
_LOW = (torch.bfloat16, torch.float16)
_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def autocasts(graph: fx.GraphModule) -> bool:
    """Whether autocast is on around a torch-level graph now, or is switched on inside of it."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return True
    return bool(graph.graph.find_nodes(op="call_function", target=_ENTER))


def cached_inputs(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The inputs of a torch-level graph whose casts eager's autocast would keep for the whole of a call.

    Where the graph enters several autocast contexts one after the other, eager casts once in each; such a graph gives
    none. An input that the graph casts explicitly is left out too: what the user casts is not kept.
    """
    if not autocasts(graph) or not torch.is_autocast_cache_enabled() or not _one_context(graph):
        return ()
    placeholders = graph.graph.find_nodes(op="placeholder")
    return tuple(
        i
        for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and value.dtype is torch.float32
        and not any(user.op == "call_method" and user.target in _EXPLICIT for user in node.users)
    )


_EXPLICIT = {"to", "type", "type_as", "bfloat16", "half"}


def _one_context(graph: fx.GraphModule) -> bool:
    """Whether all that is cast inside is cast within one outermost autocast context whose cache is on."""
    enters = graph.graph.find_nodes(op="call_function", target=_ENTER)
    if any(node.args[3:] == (False,) for node in enters):  # cache_enabled; None: as it is
        return False
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return True
    depth = outermost = 0
    for node in graph.graph.nodes:
        if node.target is _ENTER:
            outermost += depth == 0
            depth += 1
        elif node.target is _EXIT:
            depth -= 1
    return outermost == 1


def merge(joint: fx.GraphModule, cached: Collection[int], gradients: Sequence[Any]) -> None:
    """Cast each of these inputs of a joint graph once per dtype, and add the gradients before they are cast back.

    Args:
        joint: changed in place.
        cached: from :func:`cached_inputs`.
        gradients: the outputs of the graph that are gradients, one per input (None where there is none).
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    changed = False
    for i in cached:
        source = placeholders[i]
        for dtype in _LOW:
            casts = [node for node in source.users if node.target is _CAST and node.kwargs.get("dtype") is dtype]
            if len(casts) < 2:
                continue
            changed = True
            for other in casts[1:]:
                other.replace_all_uses_with(casts[0])
                joint.graph.erase_node(other)
            if i < len(gradients) and isinstance(gradients[i], fx.Node):
                _add_before_cast(joint.graph, gradients[i], dtype)
    if changed:
        joint.graph.lint()
        joint.recompile()


def _add_before_cast(graph: fx.Graph, gradient: fx.Node, dtype: torch.dtype) -> None:
    """Turn ``(f32(a) + f32(b)) + c`` into ``f32(a + b) + c`` where a and b have the lower dtype.

    Autograd adds what comes to one tensor in the order in which it comes, each to the sum so far.
    """
    terms: list[Any] = []
    sums: list[fx.Node] = []
    top: Any = gradient
    while isinstance(top, fx.Node) and top.target is _ADD and not top.kwargs and _is_sum(top, sums):
        terms.append(top.args[1])
        sums.append(top)
        top = top.args[0]
    terms.append(top)
    terms.reverse()
    back = [term for term in terms if isinstance(term, fx.Node) and _casts_back(term, dtype)]
    if len(back) < 2:
        return
    last = back[-1]
    with graph.inserting_before(last):
        total: Any = back[0].args[0]
        for term in back[1:]:
            total = _added(graph, total, term.args[0], like=back[0].args[0])
        last.args = (total, *last.args[1:])
    rest = [term for term in terms if term not in back or term is last]
    with graph.inserting_before(gradient):
        result: Any = rest[0]
        for term in rest[1:]:
            result = _added(graph, result, term, like=gradient)
    gradient.replace_all_uses_with(result)
    for node in (*sums, *back[:-1]):
        graph.erase_node(node)


def _is_sum(node: fx.Node, above: list[fx.Node]) -> bool:
    """Whether autograd's engine made this sum: nobody but the sum above it uses it."""
    return not above or len(node.users) == 1


def _casts_back(term: fx.Node, dtype: torch.dtype) -> bool:
    if term.target is not _CAST or len(term.users) != 1 or term.kwargs.get("dtype") is not torch.float32:
        return False
    given = term.args[0]
    return isinstance(given, fx.Node) and given.meta["val"].dtype is dtype


def _added(graph: fx.Graph, one: Any, other: Any, like: Any) -> fx.Node:
    node = graph.call_function(_ADD, (one, other))
    node.meta = {key: value for key, value in like.meta.items() if key in ("val", "tensor_meta", "stack_trace")}
    return node
