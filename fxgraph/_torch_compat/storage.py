"""Who holds a tensor, or a buffer: ``torch._C._storage_Use_Count`` (as in torch's ``_inductor/cudagraph_trees.py``)."""

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


class Held:
    """Watches the storages of some tensors: is anybody else holding one of them?

    It keeps the storages alive, and takes as the baseline the count at the moment of its making, when only the slot
    holds them. Views, detached tensors and autograd's saved variables all count.
    """

    __slots__ = ("_addresses", "_baselines", "_storages")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._addresses = [storage._cdata for storage in self._storages]
        self._baselines = use_counts(self._addresses)

    def any(self) -> bool:
        """Whether somebody else holds at least one of the storages."""
        return use_counts(self._addresses) != self._baselines

    def which(self) -> list[int]:
        """Indices of the tensors whose storages somebody else holds."""
        counts = zip(use_counts(self._addresses), self._baselines, strict=True)
        return [i for i, (count, baseline) in enumerate(counts) if count != baseline]


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
        return self._references() > self._alone or self.tensor._use_count() > 1  # type: ignore[attr-defined]

    def _references(self) -> int:
        return sys.getrefcount(self.tensor)


Watched._alone = Watched(torch.empty(0))._references()
