"""Who captures and replays. ``base.py`` is the contract, ``cpu.py`` and ``cuda.py`` fulfil it."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .base import CapturedRegion, Engine, Pool
from .cpu import CpuEngine


@functools.cache
def get(name: str) -> Engine:
    """The engine of that name, ``cpu`` or ``cuda``."""
    if name == "cpu":
        return CpuEngine()
    from .cuda import CudaEngine

    return CudaEngine()


def name_for(option: str, devices: Iterable[torch.device]) -> str:
    """The name of the engine for tensors on these devices, where ``option`` may be ``auto``."""
    if option != "auto":
        return option
    return "cuda" if any(device.type == "cuda" for device in devices) else "cpu"


def for_tensors(tensors: Iterable[torch.Tensor]) -> Engine:
    """The engine for these tensors where nothing else says which."""
    return get(name_for("auto", {tensor.device for tensor in tensors}))


__all__ = ["CapturedRegion", "CpuEngine", "Engine", "Pool", "for_tensors", "get", "name_for"]
