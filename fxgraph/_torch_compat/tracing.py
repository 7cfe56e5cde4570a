"""What has to be so while torch traces: one thread at a time, and no warnings that eager would not give."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from torch._dynamo import convert_frame

LOCK = convert_frame.compile_lock
"""Held while torch traces or captures: fx's interpreter, which captures, writes process-wide state too. It is the lock
under which Dynamo compiles, in other threads as well.
"""


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    _FAKE_TENSORS.addFilter(_drop)
    try:
        yield
    finally:
        _FAKE_TENSORS.removeFilter(_drop)


_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


def _drop(record: logging.LogRecord) -> bool:
    return not record.msg.startswith(("failed while attempting to run meta", "fake tensor raised"))


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Enter around every use of Dynamo, AOTAutograd or make_fx.

    torch.fx patches ``nn.Module`` and keeps process-wide state while it traces, and AOTAutograd switches anomaly mode,
    so two traces at once disturb each other. Both look at ``.grad`` of every tensor that they meet, which warns for
    tensors that are no leaves, and where an op fails on fakes, torch logs that as an error before it raises it.
    """
    with LOCK, warnings.catch_warnings(), _unlogged():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
