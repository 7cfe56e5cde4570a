"""What a capture of a program is valid for, beyond what the guards have checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .plan import picker
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
            parts.append((type(value), repr(value)))  # -0.0 == 0.0, and nan is no nan
        elif spec.live:
            parts.append((value.data_ptr(), value.requires_grad, value.is_inference(), value.dtype, value.shape))
        else:
            parts.append(
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.device,
                    value.requires_grad,
                    value.is_inference(),
                    value.is_conj(),
                    value.is_neg(),
                    autocasts and value.is_leaf,
                )
            )
    return tuple(parts)


def guarded_key_of(specs: Sequence[InputSpec], autocasts: bool) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The same for a graph whose inputs are tensors, all guarded by Dynamo with static shapes, as a quick function.

    Guards have seen sizes, strides, dtypes, devices, ``requires_grad``, conj and neg bits and whether it is an
    inference tensor (``TENSOR_MATCH``), grad mode and autocast. What they do not see is where live inputs lie,
    inference mode, and which inputs are leaves.
    """
    live = picker([i for i, spec in enumerate(specs) if spec.live])
    others = [i for i, spec in enumerate(specs) if not spec.live] if autocasts else []
    inference, address = torch.is_inference_mode_enabled, torch.Tensor.data_ptr

    def key(inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (inference(), *map(address, live(inputs)), *[inputs[i].is_leaf for i in others])

    return key


def key_names(specs: Sequence[InputSpec], autocasts: bool, guarded: bool) -> list[str]:
    """What each part of a key of :func:`key_of`, or of :func:`guarded_key_of` where ``guarded``, is about."""
    if not guarded:
        return ["grad mode", "inference mode", *map(str, specs)]
    others = [spec for spec in specs if not spec.live] if autocasts else []
    return ["inference mode", *map(str, [*[spec for spec in specs if spec.live], *others])]


class WrittenMemory:
    """Whether the inputs that a capture writes share memory with others, for calls that :func:`guarded_key_of` keys.

    Live inputs lie where they lay at the first call, so from then on only the others have to be compared with what is
    written, as long as all of that is live.
    """

    def __init__(self, specs: Sequence[InputSpec], written: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
        self._written = written
        self._always = shares_memory(inputs, [i for i in written if specs[i].live])
        self._static = [i for i, spec in enumerate(specs) if not spec.live]
        self._all_live = all(specs[i].live for i in written)
        self._places = {inputs[i].untyped_storage().data_ptr() for i in written} - {0}

    def shared(self, inputs: Sequence[torch.Tensor]) -> bool:
        """For these inputs."""
        if not self._all_live:
            return shares_memory(inputs, self._written)
        return self._always or any(inputs[i].untyped_storage().data_ptr() in self._places for i in self._static)


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
