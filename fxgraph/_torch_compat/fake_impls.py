"""torch's fake ``masked_select``: how many elements it may give.

``torch._subclasses.fake_impls`` takes it to be at most as many as ``self`` has, and Dynamo puts an assertion of that
into the graph. But a mask may be larger than ``self``, which is expanded then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls


@contextlib.contextmanager
def masks_broadcast() -> Iterator[None]:
    """While tracing inside, a masked selection may give as many elements as ``self`` and the mask together have."""
    op, known = torch.ops.aten.masked_select.default, fake_impls.op_implementations_dict
    original = known[op]

    def masked_select(mode: Any, func: Any, self: torch.Tensor, mask: torch.Tensor) -> Any:
        return original(mode, func, self.expand(torch.broadcast_shapes(self.shape, mask.shape)), mask)

    known[op] = masked_select
    try:
        yield
    finally:
        known[op] = original
