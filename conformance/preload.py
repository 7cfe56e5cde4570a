"""Imported once, by the process whose forks run the captures: the op database, without touching the GPU.

CUDA does not survive a fork, so nothing here may initialise it. Torch's op database asks for two things at import:
whether there is a GPU, which NVML answers too, and its compute capability, which the parent passes on.
"""

from __future__ import annotations

import os

import torch

from . import captures, in_worker, ops

CAPABILITY = "FXGRAPH_CONFORMANCE_CAPABILITY"
"""Environment variable: the GPU's compute capability, ``9.0`` for instance."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Torch's environment variable: look for GPUs without initialising CUDA."""

__all__ = ["CAPABILITY", "NVML", "captures", "in_worker"]


def announce() -> None:
    """In the parent, before the first process: what the forks' parent has to know."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there are cores run beside each other
    if torch.cuda.is_available():
        os.environ[NVML] = "1"
        os.environ[CAPABILITY] = "{}.{}".format(*torch.cuda.get_device_capability())


def _import_database() -> None:
    asked = torch.cuda.get_device_capability
    if CAPABILITY in os.environ:
        major, _, minor = os.environ[CAPABILITY].partition(".")
        known = (int(major), int(minor))
        torch.cuda.get_device_capability = lambda device=None: known
    try:
        ops.database()
    finally:
        torch.cuda.get_device_capability = asked


if CAPABILITY in os.environ or not torch.cuda.is_available():
    _import_database()
