"""The memory format that kernels take a tensor's strides for: ``torch._prims_common``, as in C++."""

from __future__ import annotations

from torch._prims_common import suggest_memory_format

__all__ = ["suggest_memory_format"]
