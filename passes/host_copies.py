"""Copies between the memory of the host and that of a device, as they are written at all levels of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from .facts import argument, computes_tensor, describe_call, input_tensors_of, is_aten, name_of, tensors_of, value_of

_COPIES = frozenset({"_to_copy", "copy_", "copy", "to", "cuda", "cpu", "type", "type_as", "device_put", "_copy_from"})
# What makes a tensor of numbers that Python holds, and which argument they are.
_FROM_PYTHON = {"tensor": ("data", 0), "as_tensor": ("data", 0), "asarray": ("obj", 0), "new_tensor": ("data", 1)}
_ON_HOST = ("cpu", "meta")


def host_copy(node: Node) -> str | None:
    """Return the copy between host and device memory that ``node`` makes, in words, or None.

    On a graph whose values are all on the CPU there is none. Where the device of ``x`` is unknown, ``x.cpu()`` is one,
    and ``x.to("cpu")`` by its argument. Numbers that Python holds are copied where they become a tensor of a device,
    and lists of them where they are an index of one.
    """
    name = name_of(node)
    if name in ("getitem", "setitem"):
        return _index_copied(node)
    data = data_of(node)
    if data is not None and not isinstance(data, Node):
        if any(map(computes_tensor, pytree.tree_leaves(data))):
            return None  # they are read first, which is more than a copy
        to = next((tensor.device for tensor in tensors_of(node)), None) or _chosen_device(node)
        copied = to is not None and to.type not in _ON_HOST
        return f"{describe_call(node)} of numbers that Python holds, to {to}" if copied else None
    if name not in _COPIES and data is None:
        return None
    before = {tensor.device for tensor in input_tensors_of(node) if not tensor.is_meta}
    after = {tensor.device for tensor in tensors_of(node) if not tensor.is_meta}
    kinds = {device.type for device in before | after}
    if "cpu" in kinds and len(kinds) > 1:
        source = _names(before - after) or _names(before)
        return f"{describe_call(node)} from {source} to {_names(after)}"
    if after or is_aten(node) or kinds == {"cpu"}:
        return None
    to = _chosen_device(node) if name == "to" else None
    is_to_cpu = name == "cpu" or (to is not None and to.type == "cpu")
    return f"{describe_call(node)} to cpu" if is_to_cpu else None


def data_of(node: Node) -> Any:
    """Return what a call makes a tensor of (``torch.tensor``, ``new_tensor`` and their kin); None for other calls."""
    found = _FROM_PYTHON.get(name_of(node) or "")
    return None if found is None or is_aten(node) else argument(node, *found)


def indices_of(node: Node) -> Iterator[Any]:
    """Yield the indices that an indexing call is given, one for each dimension; none for an element of a tuple."""
    if name_of(node) == "getitem" and _is_sequence(node.args[0]):
        return
    index = argument(node, "indices", 1)
    several = isinstance(index, tuple) or (isinstance(index, list) and (is_aten(node) or not _are_numbers(index)))
    yield from index if several else (index,)


def _is_sequence(arg: Any) -> bool:
    return isinstance(arg, Node) and isinstance(value_of(arg), (tuple, list))


def _are_numbers(index: Any) -> bool:
    """Whether an index is a list that torch makes a tensor of."""
    return isinstance(index, list) and bool(index) and all(isinstance(one, int) for one in index)


def _index_copied(node: Node) -> str | None:
    indexed = node.args[0]
    device = next((tensor.device for tensor in tensors_of(indexed)), None) if isinstance(indexed, Node) else None
    if is_aten(node) or device is None or device.type in _ON_HOST or not any(map(_are_numbers, indices_of(node))):
        return None
    return f"{describe_call(node)} by a list, to {device}"


def _chosen_device(node: Node) -> torch.device | None:
    """The device that a call asks for."""
    given = (value for value in (*node.args[1:], *node.kwargs.values()) if isinstance(value, (str, torch.device)))
    return next(map(torch.device, given), None)


def _names(devices: set[torch.device]) -> str:
    return " and ".join(sorted(str(device) for device in devices))
