"""Which indices are boolean masks, also in graphs that carry no fake values (``torch.fx.symbolic_trace``)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import op_lists
from .facts import constant_of, dtype_of, name_of

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


def _chosen_dtype(node: Node, name: str | None) -> torch.dtype | None:
    """The dtype that a call asks for."""
    given = [*node.kwargs.values(), *(node.args[1:] if name in ("to", "type", "view") else ())]
    if name == "type" and any(isinstance(one, str) and one.endswith(_MASK_TYPES) for one in given):
        return torch.bool
    if name in ("to", "type_as"):
        given += [dtype_of(one) for one in node.all_input_nodes[1:]]
    return next((one for one in given if isinstance(one, torch.dtype)), None)
