"""Who holds a buffer: ``torch._C._storage_Use_Count`` (used by torch's own ``_inductor/cudagraph_trees.py``)."""

from __future__ import annotations

from collections.abc import Sequence

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
