"""What has to be so while torch traces: one thread at a time, and no warnings that eager would not give."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

LOCK = threading.RLock()
"""Held while torch traces or captures: fx's interpreter, which captures, writes process-wide state too."""


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Enter around every use of Dynamo, AOTAutograd or make_fx.

    torch.fx patches ``nn.Module`` and keeps process-wide state while it traces, and AOTAutograd switches anomaly mode,
    so two traces at once disturb each other. Both look at ``.grad`` of every tensor that they meet, which warns for
    tensors that are no leaves.
    """
    with LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
