"""What has to be so while torch traces: one thread at a time, no warnings that eager would not give, no traces left."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch._dynamo import convert_frame
from torch._subclasses.fake_tensor import FakeTensor, is_fake

from passes.fakes import failures_unlogged

LOCK = convert_frame.compile_lock
"""Held while torch traces or captures: fx's interpreter, which captures, writes process-wide state too. It is the lock
under which Dynamo compiles, in other threads as well.
"""


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Enter around every use of Dynamo, AOTAutograd or make_fx.

    torch.fx patches ``nn.Module`` and keeps process-wide state while it traces, and AOTAutograd switches anomaly mode,
    so two traces at once disturb each other. Both look at ``.grad`` of every tensor that they meet, which warns for
    tensors that are no leaves, and where an op fails on fakes, torch logs that as an error before it raises it.
    """
    with LOCK, warnings.catch_warnings(), failures_unlogged():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def forget_tensors(values: Iterable[Any]) -> None:
    """Have the modes of fake values, which live on with them, drop their weak references to the tensors that they met.

    torch swaps no tensor to which there is a weak reference (``torch.utils.swap_tensors``, ``Module.to`` and
    ``load_state_dict`` under ``torch.__future__.set_swap_module_params_on_conversion``).
    """
    for mode in {value.fake_mode for value in values if isinstance(value, FakeTensor)}:
        convert_frame._clear_fake_mode_weakrefs(mode)


def fake_mode_of(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode of the fake tensors among these; one that does nothing where there are none."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), contextlib.nullcontext())


__all__ = ["LOCK", "fake_mode_of", "forget_tensors", "is_fake", "tracing"]
