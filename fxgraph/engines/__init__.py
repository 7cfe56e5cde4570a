"""Who captures and replays. ``base.py`` is the contract, ``cpu.py`` and ``cuda.py`` fulfil it."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from ..errors import OptionError
from .base import CapturedRegion, Engine, Pool, Region, blamed
from .cpu import CpuEngine


@functools.cache
def get(name: str) -> Engine:
    """The engine of that name, ``cpu`` or ``cuda``."""
    if name == "cpu":
        return CpuEngine()
    from .cuda import CudaEngine

    return CudaEngine()


def name_for(option: str, devices: Iterable[torch.device]) -> str:
    """The name of the engine for tensors on these devices, where ``option`` may be ``auto``.

    Raises:
        OptionError: if an engine is named that does not serve them.
    """
    kinds = {device.type for device in devices}
    fitting = "cuda" if "cuda" in kinds else "cpu"
    if option not in ("auto", fitting):
        raise OptionError(
            "engine-device",
            "the engine does not serve the device of the tensors",
            where="options={'engine': ...}",
            observed=f"engine {option!r} for tensors on {', '.join(sorted(kinds)) or 'no device'}",
            expected=f"'auto' or {fitting!r}",
            hint="leave the engine to 'auto', or move the module and its inputs",
        )
    return fitting


def for_tensors(tensors: Iterable[torch.Tensor]) -> Engine:
    """The engine for these tensors where nothing else says which."""
    return get(name_for("auto", {tensor.device for tensor in tensors}))


__all__ = ["CapturedRegion", "CpuEngine", "Engine", "Pool", "Region", "blamed", "for_tensors", "get", "name_for"]
