"""Fake tensors: tensors without data, on which operators give the metadata of their results."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """Return the mode of the first fake tensor, or a new one."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()


def has_symbols(value: Any) -> bool:
    """Return whether a value is a symbolic whole number, or a tensor that has some as sizes or strides."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


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
        if plain.fake_mode is mode or has_symbols(plain):
            return plain
        with mode:
            count = plain.untyped_storage().nbytes() // plain.itemsize
            base = torch.empty(count, dtype=plain.dtype, device=plain.device)
            return base.as_strided(plain.size(), plain.stride(), plain.storage_offset())


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Where an op fails on fake tensors, torch logs that as an error before it raises it; not inside of this."""

    def drop(record: logging.LogRecord) -> bool:
        return not record.msg.startswith(("failed while attempting to run meta", "fake tensor raised"))

    fake_tensor.log.addFilter(drop)
    try:
        yield
    finally:
        fake_tensor.log.removeFilter(drop)


_TAKES_PLACE = {"select": 2, "narrow": 2}  # methods and functions of torch, and which argument is a place


def at_first_place(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a torch-level call with 0 for each 0-dim fake tensor that says a place along a dimension.

    Eager reads such a place on the host: ``x[i]``, ``x[0, i]``, ``x.select(0, i)``. What lies there has the same shape
    and strides at every place, and a fake tensor has no number to be read.
    """
    if target in (operator.getitem, operator.setitem) and len(args) > 1 and isinstance(args[0], torch.Tensor):
        index = args[1]
        first = tuple(map(_place, index)) if isinstance(index, tuple) else _place(index)
        return (args[0], first, *args[2:])
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    place = _TAKES_PLACE.get(name, len(args))
    if place >= len(args) or target not in (name, getattr(torch, name, None)) or not isinstance(args[0], torch.Tensor):
        return args
    return (*args[:place], _place(args[place]), *args[place + 1 :])


def _place(index: Any) -> Any:
    if isinstance(index, list):
        return [0 if isinstance(one, torch.SymInt) else _place(one) for one in index]
    return 0 if isinstance(index, FakeTensor) and is_place(index) else index


def is_place(index: torch.Tensor) -> bool:
    """Return whether an index is a 0-dim tensor that stands for one place, which eager reads on the host."""
    numbers = not index.dtype.is_floating_point and not index.dtype.is_complex
    return index.dim() == 0 and numbers and index.dtype not in (torch.bool, torch.uint8)
