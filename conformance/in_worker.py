"""What runs in a worker process. A module of its own, since ``__main__`` cannot be found by the other process."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import captures, models, ops
from .outcomes import Row


def _quiet() -> None:
    """Warnings and logs of a thousand ops would hide the progress."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives


def prepare_models() -> None:
    """Before the first model."""
    _quiet()
    torch.backends.cudnn.deterministic = True  # so that eager is repeatable wherever it can be


def prepare_ops() -> None:
    """Before the first op."""
    _quiet()
    ops.database()


def prepare_captures(device: str) -> None:
    """Before the first capture.

    Raises:
        RuntimeError: in a fork of a process that has initialised CUDA.
    """
    if device == "cuda":
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("CUDA was initialised before the fork")
        torch.cuda.init()
    prepare_ops()


def run_capture(case: Any, report: Callable[[str], None], *, device: str, samples: int) -> Row:
    """An op, captured and judged."""
    return captures.run(case, device, samples, report=report)


def run_op(case: Any, report: Callable[[str], None], *, device: str, limit: int) -> Row:
    """A case of the op database."""
    return ops.run(case, device, limit, report=report)


def run_model(case: Any, report: Callable[[str], None], *, device: str, timing: int) -> Row:
    """A case of the models."""
    return models.run(case, device, timing, report=report)


def row_of(case: Any) -> Row:
    """The row of a case that gave none."""
    return {"case": case.key, **dataclasses.asdict(case)}
