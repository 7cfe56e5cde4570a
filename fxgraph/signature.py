"""What a capture of a program is valid for, beyond what the guards have checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .trace import InputSpec


def key_of(specs: Sequence[InputSpec], inputs: Sequence[Any], autocasts: bool = False) -> tuple[Any, ...]:
    """The key under which a capture for these inputs is kept.

    Live inputs count by address (a capture reads them where they are), other tensors by everything that shapes a kernel
    or a gradient, numbers by value. Grad mode and inference mode count too. So does, under autocast, whether an input
    is a leaf: autocast keeps the casts of leaves.
    """
    parts: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    for spec, value in zip(specs, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            parts.append((type(value), value))
        elif spec.live:
            parts.append((value.data_ptr(), value.requires_grad, value.dtype, value.shape))
        else:
            parts.append(
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    autocasts and value.is_leaf,
                )
            )
    return tuple(parts)


def shares_memory(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Whether an input that the program changes in place shares its storage with another input."""
    if not mutated:
        return False
    addresses = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)]
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    for i in mutated:
        own = inputs[i].untyped_storage().data_ptr()
        if own and any(address == own for j, address in zip(tensors, addresses, strict=True) if j != i):
            return True
    return False
