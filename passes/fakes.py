"""Fake tensors: tensors without data, on which operators give the metadata of their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """Return the mode of the first fake tensor, or a new one."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()


def fake(value: Any, mode: FakeTensorMode) -> Any:
    """Return a fake tensor of ``mode`` with the metadata of ``value`` that needs no gradient; anything else as it is.

    make_fx on real tensors gives each node a fake value of a mode of its own.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        plain = value.detach()  # of the same storage, without autograd's record
        if not isinstance(plain, FakeTensor):
            return mode.from_tensor(plain, static_shapes=True)
        if plain.fake_mode is mode or any(isinstance(size, torch.SymInt) for size in (*plain.shape, *plain.stride())):
            return plain
        with mode:
            count = plain.untyped_storage().nbytes() // plain.itemsize
            base = torch.empty(count, dtype=plain.dtype, device=plain.device)
            return base.as_strided(plain.size(), plain.stride(), plain.storage_offset())
