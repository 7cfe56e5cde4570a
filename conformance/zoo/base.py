"""What a model of the zoo is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one step."""


class NotInstalled(Exception):
    """The library that a model comes from is not there."""


def distance_from_one(outputs: Any) -> torch.Tensor:
    """A loss for any output: its own ``loss`` where it has one, else the mean squared distance from one, summed
    over all that is differentiable. (From zero it would have no gradient where a head begins at zero.)"""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([(t.float() - 1).square().mean() for t in tensors]).sum()


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model.

    Attributes:
        name: ``library:model``, or the model alone where it needs torch only.
        build: makes the module; the random state is set before. Raises :class:`NotInstalled`.
        batch: makes one step's arguments on the CPU; the random state is set before.
        loss: from the outputs.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], torch.Tensor] = distance_from_one


def image(size: int = 32, batch: int = 2, channels: int = 3) -> Callable[[], Batch]:
    """Batches of random images."""
    return lambda: ((torch.randn(batch, channels, size, size),), {})


def tokens(length: int = 12, batch: int = 2, vocabulary: int = 64) -> Callable[[], Batch]:
    """Batches of random token ids."""
    return lambda: ((torch.randint(vocabulary, (batch, length)),), {})
