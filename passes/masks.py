"""Which indices are boolean masks, also in graphs that carry no fake values (``torch.fx.symbolic_trace``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import op_lists
from .facts import argument, constant_of, dtype_of, name_of, tensors_of, value_of
from .host_copies import indices_of

_MASKS = (torch.bool, torch.uint8)
_MASK_TYPES = ("BoolTensor", "ByteTensor")


def is_mask(index: Any) -> bool:
    """Return whether an index is a boolean (or uint8) tensor, or a list that becomes one: by its dtype, else by what
    computes it.
    """
    if isinstance(index, list) and index and all(isinstance(one, bool) for one in index):
        return True
    held = constant_of(index) if isinstance(index, Node) else index
    if isinstance(held, torch.Tensor):
        return held.dtype in _MASKS
    if not isinstance(index, Node) or held is not None:
        return False
    name = name_of(index)
    if name in op_lists.MASK_MAKERS:
        return True
    chosen = _chosen_dtype(index, name)
    if chosen is not None:
        return chosen in _MASKS
    if name in op_lists.MASK_COMBINERS:
        return any(is_mask(source) for source in index.all_input_nodes)
    if name in op_lists.KEEPS_DTYPE:
        tensors = index.args[0] if index.args else index.kwargs.get("input", index.kwargs.get("tensors"))
        return is_mask(next(iter(tensors), None) if isinstance(tensors, (tuple, list)) else tensors)
    return False


def fills_with_number(node: Node) -> bool:
    """Return whether a call writes one number where one boolean mask is true, which the kernels do by ``masked_fill``.

    ATen chooses that by the value: it has one element and lies on the CPU (``canDispatchToMaskedFill`` in
    ``aten/src/ATen/native/TensorAdvancedIndexing.cpp``). In a graph whose tensors all lie there only a constant
    counts: another value would lie on the device that the graph stands for.
    """
    name, places = name_of(node), list(indices_of(node))
    if name not in ("setitem", "index_put", "index_put_") or argument(node, "accumulate", 3):
        return False
    masks = [one for one in places if is_mask(one)]
    if len(masks) != 1 or not _may_fill(masks[0]) or any(isinstance(one, list) for one in places):
        return False
    if any(isinstance(one, Node) and not is_mask(one) and not _is_number(value_of(one)) for one in places):
        return False
    return _is_number_on_host(argument(node, "values", 2), node.args[0])


def _may_fill(mask: Any) -> bool:
    """Not of bytes, which ``masked_fill`` refuses, and not without dimensions: Python reads such a mask on the host."""
    value = value_of(mask) if isinstance(mask, Node) else mask
    return not isinstance(value, torch.Tensor) or (value.dtype is torch.bool and value.dim() > 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _is_number_on_host(value: Any, written: Any) -> bool:
    if not isinstance(value, Node):
        return _is_number(value)
    known = value_of(value)
    if isinstance(known, torch.Tensor) and (known.dim() or known.device.type != "cpu"):
        return False
    device = next((tensor.device.type for tensor in tensors_of(written)), None) if isinstance(written, Node) else None
    return (known is not None and device not in (None, "cpu")) or _is_constant(value)


def _is_constant(node: Node) -> bool:
    """Whether a value is a literal, or made from one. An attribute alone is state, which may lie anywhere."""
    name = name_of(node)
    if name not in op_lists.LITERALS:
        return False
    lifted = name.startswith("lift_fresh")
    return all((lifted and one.op == "get_attr") or _is_constant(one) for one in node.all_input_nodes)


def _chosen_dtype(node: Node, name: str | None) -> torch.dtype | None:
    """The dtype that a call asks for."""
    given = [*node.kwargs.values(), *(node.args[1:] if name in ("to", "type", "view") else ())]
    if name == "type" and any(isinstance(one, str) and one.endswith(_MASK_TYPES) for one in given):
        return torch.bool
    if name in ("to", "type_as"):
        given += [dtype_of(one) for one in node.all_input_nodes[1:]]
    return next((one for one in given if isinstance(one, torch.dtype)), None)
