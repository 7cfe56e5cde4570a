"""The autocast state of a moment, to be entered again later (``torch/utils/checkpoint.py`` does the same)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class AutocastState:
    """Which device types autocast, and to what."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def now(cls) -> AutocastState:
        """The calling thread's state."""
        kinds = ("cpu", "cuda")
        devices = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(devices, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same state."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.devices:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield
