"""The CUDA engine. The only file that names CUDA graphs, streams, pools and generators.

Read with ``torch/cuda/graphs.py``. What is different here: no device-wide synchronisation or cache flush per capture, the
capture's stream and the caller's wait for each other, the device is that of the tensors, and a capture that CUDA invalidates
does not leave torch's generators believing that they still capture (Note [Generators after a failed capture]).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from .._torch_compat.autograd import autocast_off
from .base import CapturedRegion, Engine, Pool, Region, empty_like_layout, exclusive, poison_value


class CudaPool(Pool):
    """A private memory pool of the caching allocator, and the stream on which regions are captured into it."""

    def __init__(self, device: torch.device, handle: object = None) -> None:
        self.device = device
        self._handle: Any = torch.cuda.graph_pool_handle() if handle is None else handle
        self.stream = torch.cuda.Stream(device)
        self.last: torch.cuda.Stream | None = None
        # The allocator forgets a pool when its last graph goes, and then refuses the handle while a tensor of the pool lives.
        self._keeper = _harmless_capture(device, self._handle)

    @property
    def handle(self) -> object:
        return self._handle

    def bytes_held(self) -> int:
        segments = torch.cuda.memory_snapshot(self._handle)
        return sum(
            segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self._handle)
        )

    def order(self) -> None:
        """The current stream waits for the last one on which a region of this pool was replayed."""
        current = torch.cuda.current_stream(self.device)
        if self.last is not None and self.last != current:
            current.wait_stream(self.last)
        self.last = current


class CudaEngine(Engine):
    """See ``base.py`` for the contract."""

    name = "cuda"

    def new_pool(self, device: torch.device, handle: object = None) -> CudaPool:
        return CudaPool(device, handle)

    def empty(self, pool: Pool, like: torch.Tensor) -> torch.Tensor:
        return empty_like_layout(like, like.device)

    def capture(self, pool: Pool, region: Region, inputs: Sequence[torch.Tensor], warmup: int) -> CudaRegion:
        assert isinstance(pool, CudaPool), "a pool of another engine"
        with exclusive(), torch.cuda.device(pool.device), torch.no_grad(), torch.inference_mode(False), autocast_off():
            caller, side = torch.cuda.current_stream(), pool.stream
            pool.order()
            side.wait_stream(caller)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(side):
                    for _ in range(warmup):
                        region(*inputs)
                    outputs = _record(graph, pool, region, inputs)
            finally:
                caller.wait_stream(side)
        return CudaRegion(pool, graph, outputs)

    def poison(self, tensors: Sequence[torch.Tensor]) -> None:
        if POISON:
            for tensor in tensors:
                if not torch._debug_has_internal_overlap(tensor):
                    tensor.detach().fill_(poison_value(tensor.dtype))

    def _device_rng(self) -> list[torch.Tensor]:
        if not torch.cuda.is_initialized():
            return []
        return torch.cuda.get_rng_state_all()

    def _set_device_rng(self, states: list[torch.Tensor]) -> None:
        if states:
            torch.cuda.set_rng_state_all(states)


POISON = False
"""Debug switch (tests set it): fill a slot's buffers with poison when the slot is given back."""


def _record(
    graph: torch.cuda.CUDAGraph, pool: CudaPool, region: Region, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Capture on the current stream. ``thread_local``: what other threads do with CUDA meanwhile cannot spoil it."""
    try:
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        outputs = tuple(region(*inputs))
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()  # raises once more where the capture was invalidated; the first error is the one to tell
        _after_failure(graph, pool)
        raise
    return outputs


def _after_failure(graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
    """Note [After a failed capture]

    ``CUDAGraph::capture_end`` throws right after the driver has ended an invalidated capture, before it tells the allocator and
    the registered generators that the capture is over (torch 2.11: ``aten/src/ATen/cuda/CUDAGraph.cpp``). The allocator would
    refuse the next capture into the pool ("already recording to mempool_id"), and every random op outside of a capture would
    raise "Offset increment outside graph capture encountered unexpectedly". So the allocator is told here, and a harmless
    capture into a pool of its own takes the generators through the whole course once more.
    """
    with contextlib.suppress(RuntimeError):  # raises where capture_end did get that far
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # raises where there is nothing to reset
        graph.reset()
    torch.cuda.synchronize()
    _harmless_capture(pool.device, None).reset()


def _harmless_capture(device: torch.device, handle: Any) -> torch.cuda.CUDAGraph:
    """A graph with one small kernel, captured into a pool."""
    graph = torch.cuda.CUDAGraph()
    with exclusive(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        scratch = torch.zeros(1, device=device)
        graph.capture_begin(*([] if handle is None else [handle]), capture_error_mode="thread_local")
        scratch.zero_()
        graph.capture_end()
    return graph


class CudaRegion(CapturedRegion):
    """One CUDA graph and the buffers that it writes."""

    def __init__(self, pool: CudaPool, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self.outputs = outputs
        self._pool, self._graph = pool, graph
        self._released = False

    def replay(self) -> None:
        assert not self._released, "replay of a released region"
        self._pool.order()
        self._graph.replay()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.outputs = ()
            self._graph.reset()
