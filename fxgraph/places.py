"""Where the large inputs of a capture lie from call to call.

Note [Large inputs]

An input is copied into a static buffer before a replay. For a large one that is a pass over its memory, and the buffer
is as large again. But a training loop's batches come to lie in the same few places: a loader's own buffers, or what
the caching allocator gives back in turn. So a capture notes where its large inputs lie; once the last CALLS calls had
few places, slots are captured that read them there, one for each place, and the slots that copy are given up. A call
with its inputs elsewhere has them copied again, and the noting begins anew, TRIES times.

What is read is memory of the call's own arguments. A backward that reads it keeps the argument, as eager's saved tensor
does, and raises autograd's error where it was changed in place in between. Each such slot has outputs, saved values and
gradients of its own, so there are as many places as fit into the memory that a slot with a copy takes.

Note [Static inputs]

Buffers that are the user's to fill (``GraphedCallable.static_inputs``) are one more such place, of whatever size, which
is known from the beginning and never forgotten: the callable keeps them, so nothing else comes to lie there. All of the
above holds for them too. They are no buffers of a slot's own, which a call with other arguments would overwrite.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch

from .plan import Plan

LEAST_BYTES = 1 << 20
"""Smaller inputs are copied: several in one launch, which takes no longer than looking for a place."""

CALLS = 8
TRIES = 3
MOST_PLACES = 4
ALIGNMENT = 16
"""Bytes; what inductor's kernels and vectorised loads take for granted."""


def large_inputs(plan: Plan, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The inputs that are worth it: copied ones that a call does not write."""
    return tuple(
        i
        for i, (spec, value) in enumerate(zip(plan.inputs, inputs, strict=True))
        if not spec.live and i not in plan.written and 0 not in value.stride() and value.nbytes >= LEAST_BYTES
    )


class Places:
    """Learns where large inputs lie, and says whether a call's are where they are read without a copy.

    Args:
        large: which inputs are large.
        affordable: gives how many places there may be.
    """

    def __init__(self, large: tuple[int, ...], affordable: Callable[[], int]) -> None:
        self.large = large
        self.known: frozenset[tuple[int, ...]] = frozenset()
        self.static: tuple[int, ...] | None = None  # Note [Static inputs]
        self._affordable = affordable
        self._recent: collections.deque[tuple[int, ...]] = collections.deque(maxlen=CALLS)
        self._tries = 0

    def of(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """The addresses of a call's large inputs if they are to be read there, None if they are to be copied."""
        where = tuple([inputs[i].data_ptr() for i in self.large])
        if where in self.known or where == self.static:
            return where
        if self.known:
            self.known = frozenset()
        if self._tries >= TRIES:
            return None
        self._recent.append(where)
        if len(self._recent) < CALLS or any(address % ALIGNMENT for address in where):
            return None
        times = collections.Counter(self._recent)
        if min(times.values()) < 2 or len(times) > min(MOST_PLACES, self._affordable()):
            return None
        self.known = frozenset(times)
        self._recent.clear()
        self._tries += 1
        return where

    def read_always(self, inputs: tuple[int, ...], where: tuple[int, ...]) -> None:
        """From now on calls with these inputs at these addresses have them read there; see Note [Static inputs].

        Other places are learned for the same inputs, if for any.
        """
        if not self.large:  # as large as is worth it none of them is
            self._tries = TRIES
        self.large, self.static, self.known = inputs, where, frozenset()
        self._recent.clear()
