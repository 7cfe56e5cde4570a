"""What torch's fake tensors (``torch._subclasses.fake_impls``) say otherwise than the kernels do.

``masked_select``: they take it to give at most as many elements as ``self`` has, and Dynamo puts an assertion of that
into the graph. But a mask may be larger than ``self``, which is expanded then.

``index`` with a uint8 tensor: to the kernels that is a mask, and fakes raise.

Batch norm on the CPU (``aten/src/ATen/native/Normalization.cpp``): they give its result the strides of its input. The
kernels make it contiguous, or channels last if the input is. A gradient that is computed in the wrong strides is summed
in another order, and not eager's to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from .layout import suggest_memory_format

Implementation = Callable[..., Any]

aten = torch.ops.aten

_BATCH_NORM = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default,
)


@contextlib.contextmanager
def as_kernels_do() -> Iterator[None]:
    """While tracing inside, fakes look as what the kernels give.

    The tables are the process's: one thread at a time changes them, and Dynamo does not read meanwhile.
    """
    known = fake_impls.op_implementations_dict
    ours = {
        aten.masked_select.default: _with_mask(known[aten.masked_select.default]),
        aten.index.Tensor: _with_bytes(known[aten.index.Tensor]),
        **dict.fromkeys(_BATCH_NORM, _batch_norm),
    }
    # torch asks a decomposition before an implementation, but not for what has an entry in the table of meta functions.
    with compile_lock, _with_entries(known, ours), _with_entries(meta_table, ours):
        # What torch remembers of these ops' results may be from before.
        for key in [key for key in FakeTensorMode.cache if key.key[0] in _BATCH_NORM]:
            FakeTensorMode.cache.pop(key, None)
        yield


@contextlib.contextmanager
def _with_entries(table: dict[Any, Implementation], entries: dict[Any, Implementation]) -> Iterator[None]:
    before = {op: table[op] for op in entries if op in table}
    table.update(entries)
    try:
        yield
    finally:
        for op in entries:
            if op in before:
                table[op] = before[op]
            else:
                table.pop(op, None)


def _with_mask(original: Implementation) -> Implementation:
    def masked_select(mode: Any, func: Any, self: torch.Tensor, mask: torch.Tensor) -> Any:
        return original(mode, func, self.expand(torch.broadcast_shapes(self.shape, mask.shape)), mask)

    return masked_select


def _with_bytes(original: Implementation) -> Implementation:
    def index(mode: Any, func: Any, self: torch.Tensor, indices: Any) -> Any:
        with mode:
            as_masks = [one.bool() if one is not None and one.dtype is torch.uint8 else one for one in indices]
        return original(mode, func, self, as_masks)

    return index


def _batch_norm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    x = given["input"]
    parameters = [given.get(name) for name in ("weight", "running_mean", "save_mean")]
    if x.device.type != "cpu" or x.layout is not torch.strided:
        with mode:
            return decomposition_table[func](*args, **kwargs)
    of_statistics = next((t.dtype for t in parameters if t is not None), x.dtype)
    with mode:
        as_input = torch.empty_like(x, memory_format=suggest_memory_format(x))
        if func is aten.native_batch_norm_backward.default:
            made = [x.new_empty(x.shape[1], dtype=of_statistics) if one else None for one in given["output_mask"][1:]]
            return as_input if given["output_mask"][0] else None, *made
        training = given.get("training", func is not aten._native_batch_norm_legit_no_training.default)
        made = [x.new_empty(x.shape[1] if training else 0, dtype=of_statistics) for _ in range(2)]
        if func is aten._native_batch_norm_legit_functional.default:
            made += [torch.empty_like(given[name]) for name in ("running_mean", "running_var")]
    return as_input, *made
