"""Imported once, by the process whose forks run the captures: the op database, without touching the GPU.

CUDA does not survive a fork, so nothing here may initialise it. Importing torch asks only whether there is a GPU, which
NVML answers without CUDA if ``PYTORCH_NVML_BASED_CUDA_CHECK`` is set. Importing the op database also asks what the GPU
can do, for its lists of tests to skip (and for bfloat16 on GPUs before Maxwell): it is told that there is none.
Nor is there numba, which asks the driver.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _triton

from . import captures, in_worker, ops

__all__ = ["captures", "in_worker"]


def _import_database() -> None:
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    modules: dict[str, Any] = sys.modules
    modules.setdefault("numba", None)  # None: there is no such module
    try:
        ops.database()
    finally:
        torch.cuda.is_available = is_available
        _triton.has_triton.cache_clear()


_import_database()
