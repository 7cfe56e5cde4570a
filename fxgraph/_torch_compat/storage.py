"""Who holds a tensor, or a buffer: ``torch._C._storage_Use_Count``; and tensors in memory that they do not hold:
``torch._C._construct_storage_from_data_pointer`` (both as in torch's ``_inductor/cudagraph_trees.py``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch

_use_count = torch._C._storage_Use_Count


def use_counts(storages: Sequence[int]) -> list[int]:
    """How many tensors, storages of Python's and others hold each of these, given by their ``_cdata``."""
    return list(map(_use_count, storages))


_address = torch.UntypedStorage.data_ptr


def addresses(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Where the memory of each of these lies now: ``resize_`` and ``share_memory_`` give a storage other memory."""
    return list(map(_address, storages))


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that does not keep it: for whoever sees to it that it is only read while the memory
    is somebody's."""
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


class Held:
    """Watches the storages of some tensors: is anybody else holding one of them, or has given it other memory?

    It keeps the storages alive, and takes as the baseline the count at the moment of its making, when only the slot
    holds them. Views, detached tensors and autograd's saved variables all count.
    """

    __slots__ = ("_addresses", "_baselines", "_cdata", "_storages")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._addresses = addresses(self._storages)
        self._cdata = [storage._cdata for storage in self._storages]
        self._baselines = use_counts(self._cdata)

    def any(self) -> bool:
        """Whether at least one of the storages is not ours alone, where it was."""
        return use_counts(self._cdata) != self._baselines or addresses(self._storages) != self._addresses

    def which(self) -> list[int]:
        """Indices of the tensors whose storages are not ours alone, where they were."""
        now = zip(use_counts(self._cdata), addresses(self._storages), strict=True)
        then = zip(self._baselines, self._addresses, strict=True)
        return [i for i, (one, other) in enumerate(zip(now, then, strict=True)) if one != other]


class Watched:
    """Tells whether anybody but us still has a tensor, without a weak reference to it: one that has some cannot be
    swapped (``torch.utils.swap_tensors``).

    All who watch a tensor share one of these, so that there is one reference to be counted out.
    """

    __slots__ = ("__weakref__", "tensor")

    _known: ClassVar[weakref.WeakValueDictionary[int, Watched]] = weakref.WeakValueDictionary()
    _alone: ClassVar[int] = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Watched:
        """The one that watches this tensor."""
        known = cls._known.get(id(tensor))
        if known is None:
            known = cls._known[id(tensor)] = cls(tensor)
        return known

    @property
    def held(self) -> bool:
        """Whether it is held elsewhere: in Python, or in C++ (by a node of autograd's, say)."""
        return self._references() > self._alone or self.tensor._use_count() > 1  # type: ignore[attr-defined]  # no stub

    def _references(self) -> int:
        return sys.getrefcount(self.tensor)


Watched._alone = Watched(torch.empty(0))._references()
