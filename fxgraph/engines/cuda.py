"""The CUDA engine. The only file that names CUDA graphs, streams, pools and generators.

Read with ``torch/cuda/graphs.py``. What is different here: no device-wide synchronisation per capture, and no cache
flush where there is little to flush; the capture's stream and the caller's wait for each other, the device is that of
the tensors, and a capture that CUDA invalidates does not leave torch's generators believing that they still capture
(Note [Generators after a failed capture]).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.aliasing import Aliases

from .._torch_compat.attention import outside_of_captures, seeds
from .._torch_compat.autograd import kernels_only
from .._torch_compat.inductor import CompiledGraph
from .base import (
    CapturedRegion,
    Engine,
    Pool,
    Region,
    aten_graph,
    blame,
    blaming,
    empty_like_layout,
    exclusive,
    poison_value,
)


class CudaPool(Pool):
    """Scratch memory shared by the regions captured into it, and the stream on which they are captured.

    Note [What may lie in the shared pool]

    Memory that is free again at the end of a capture is given to the next capture into the same pool. That is right for
    scratch, which nobody reads after its region has run. It is wrong for outputs: the gradients of a backward region
    could lie where the forward region has its scratch, and a replay of the forward would overwrite a ``.grad`` that the
    user holds. So only scratch lies in the shared pool; ops whose results leave the region allocate from a pool of the
    region's own.
    """

    def __init__(self, device: torch.device, handle: object = None) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(device)
        self.last: torch.cuda.Stream | None = None
        self._last_raw: int | None = None
        self.regions: weakref.WeakSet[CudaRegion] = weakref.WeakSet()
        self._handle: Any = torch.cuda.graph_pool_handle() if handle is None else handle
        self._keeper: torch.cuda.CUDAGraph | None = None

    @property
    def handle(self) -> object:
        return self._handle

    def renew(self) -> None:
        """Go on with other memory."""
        self._handle, self._keeper = torch.cuda.graph_pool_handle(), None

    def keep(self) -> None:
        """Before a capture: one graph that stays.

        The allocator forgets a pool when its last graph goes, and then refuses the handle while a tensor of it lives.
        """
        if self._keeper is None:
            self._keeper = _harmless_capture(self.device, self._handle)

    def bytes_held(self) -> int:
        handles = {tuple(self._handle), *(region.own.handle for region in self.regions if not region.released)}
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in handles)

    def trim(self) -> None:
        if all(region.released for region in self.regions):
            self.renew()
        torch.cuda.empty_cache()

    def order(self) -> None:
        """The current stream waits for the last one on which a region of this pool was replayed."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)  # no Stream object for each replay
        if raw == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self.last is not None:
            current.wait_stream(self.last)
        self.last, self._last_raw = current, raw


class CudaEngine(Engine):
    """See ``base.py`` for the contract."""

    name = "cuda"

    def new_pool(self, device: torch.device, handle: object = None) -> CudaPool:
        return CudaPool(device, handle)

    def empty(self, pool: Pool, like: torch.Tensor) -> torch.Tensor:
        return empty_like_layout(like, like.device)

    def capture(self, pool: Pool, region: Region, inputs: Sequence[torch.Tensor], warmup: int) -> CudaRegion:
        assert isinstance(pool, CudaPool), "a pool of another engine"
        with exclusive(), torch.cuda.device(pool.device), kernels_only():
            caller, side = torch.cuda.current_stream(), pool.stream
            pool.keep()
            pool.order()
            side.wait_stream(caller)
            module = region if isinstance(region, CompiledGraph) else aten_graph(region, inputs)
            seeded = module.seeds if isinstance(module, CompiledGraph) else seeds(module)
            outside = outside_of_captures(inputs, seeded)
            try:
                with torch.cuda.stream(side):
                    # Once at least: libraries make their handles at a thread's first use, which no capture allows, and
                    # Triton loads kernels, and tries which of their variants is the fastest.
                    for _ in range(max(warmup, 1)):
                        module(*outside)
                    run = _rehearsed(module, outside) if isinstance(module, CompiledGraph) else _by_node(module)
                    _return_unused(pool.device)
                    captured = _record(pool, run, inputs)
            finally:
                caller.wait_stream(side)
        pool.regions.add(captured)
        return captured

    @property
    def poisons(self) -> bool:
        return POISON

    def poison(self, tensors: Sequence[torch.Tensor]) -> None:
        if POISON:
            for tensor in tensors:
                if not torch._debug_has_internal_overlap(tensor):
                    tensor.detach().fill_(poison_value(tensor.dtype))

    def after(self, device: torch.device, last: object) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(device)
        if isinstance(last, torch.cuda.Stream) and last != current:
            current.wait_stream(last)
        return current

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def _set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def _device_rng(self) -> list[torch.Tensor]:
        if not torch.cuda.is_initialized():
            return []
        return torch.cuda.get_rng_state_all()

    def _set_device_rng(self, states: list[torch.Tensor]) -> None:
        if states:
            torch.cuda.set_rng_state_all(states)


POISON = False
"""Debug switch (tests set it): fill a slot's buffers with poison when the slot is given back."""

MOST_UNUSED = 32 << 20
"""Bytes that the caching allocator may keep unused over a capture."""


def _return_unused(device: torch.device) -> None:
    """Before a capture: give back to the device what the caching allocator keeps, if that is much.

    The runs before a capture leave memory on the capture's stream, as much as the region needs, where nobody but the
    next such runs would find it; and the buffers of slots that have been given up are free only when the last loss that
    has come out of them is.
    """
    if torch.cuda.get_allocator_backend() == "pluggable":  # it counts nothing
        return
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    if stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"] > MOST_UNUSED:
        torch.cuda.empty_cache()


Routed = Callable[["_OwnMemory", Sequence[torch.Tensor]], "tuple[torch.Tensor, ...]"]
"""Runs a region on its inputs, and enters and leaves its own memory as it goes along."""


def _record(pool: CudaPool, run: Routed, inputs: Sequence[torch.Tensor]) -> CudaRegion:
    """Capture on the current stream. ``thread_local``: what other threads do with CUDA meanwhile cannot spoil it."""
    graph = torch.cuda.CUDAGraph()
    own = _OwnMemory(pool)
    try:
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")  # type: ignore[arg-type]
        outputs = run(own, inputs)
        own.leave()
        _end(graph)
    except BaseException as error:  # also an interrupt must not leave a stream capturing; it goes on
        if _INVALIDATED in str(error):
            blame(error, own.last_custom)
        own.leave()
        with contextlib.suppress(RuntimeError):
            _end(graph)  # raises again where the capture was invalidated; the first error is the one to tell
        _after_failure(graph, pool)
        own.release()
        raise
    return CudaRegion(pool, graph, own, outputs)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # A region of views alone has no kernel; nor has one whose first op fails.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph.capture_end()


# An op that synchronises without looking at the result ends the capture; what comes after it raises this. torch's own
# ops do look.
_INVALIDATED = "operation failed due to a previous error during capture"


class _OwnMemory:
    """A pool of a region's own; entered while ops run whose results leave the region. See Note [What may lie in the
    pool]."""

    def __init__(self, shared: CudaPool) -> None:
        self.handle: Any = tuple(torch.cuda.graph_pool_handle())
        self._shared: Any = shared.handle
        self._device = shared.device.index
        self._uses: dict[Any, int] = {self.handle: 0, self._shared: 0}
        self.entered = False
        self.last_custom: fx.Node | None = None  # the last op of the region that is not torch's own, if that is known

    def enter(self) -> None:
        """Allocations of this thread come from the own pool from now on."""
        if not self.entered:
            self._switch(self._shared, self.handle)
            self.entered = True

    def leave(self) -> None:
        """Allocations of the capture come from the shared pool again."""
        if self.entered:
            self._switch(self.handle, self._shared)
            self.entered = False

    def release(self) -> None:
        """Let go of both pools; idempotent. Memory goes back when no tensor holds it any more."""
        for handle, uses in self._uses.items():
            for _ in range(uses):
                torch._C._cuda_releasePool(self._device, handle)
        self._uses = dict.fromkeys(self._uses, 0)

    def _switch(self, old: Any, new: Any) -> None:
        # The allocator serves an allocation from the first pool that claims it, so the other must stop claiming.
        torch._C._cuda_endAllocateToPool(self._device, old)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, new)
        self._uses[new] += 1  # each beginning counts as one user of the pool


def _by_node(module: fx.GraphModule) -> Routed:
    return lambda own, inputs: tuple(_Router(module, own).run(*inputs))


class _Router(fx.Interpreter):
    """Runs a region; ops whose results leave it allocate from the region's own memory."""

    def __init__(self, module: fx.GraphModule, own: _OwnMemory) -> None:
        super().__init__(module)
        self._own = own
        self._leaving = leaving(module)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target is not operator.getitem:
            self._own.enter() if n in self._leaving else self._own.leave()
        if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace not in ("aten", "prims"):
            self._own.last_custom = n
        with blaming(n):
            return super().run_node(n)


def leaving(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes that may have put memory of an output of the graph in its place."""
    aliases = Aliases.of(module)
    results = [node for node in pytree.tree_leaves(module.graph.output_node().args) if isinstance(node, fx.Node)]
    storages = {aliases.storage(node) for node in results}
    nodes = {node for node in module.graph.nodes if aliases.storage(node) in storages}
    return nodes | {source for node in nodes if node.target is operator.getitem for source in node.all_input_nodes}


def _rehearsed(region: CompiledGraph, inputs: Sequence[torch.Tensor]) -> Routed:
    """Run a compiled region once to see which of its allocations are those of outputs.

    Its wrapper does the same each time: the n-th allocation of one run is the n-th of another. Where the wrapper cannot
    be looked into, or an output comes from elsewhere, all of the region's memory is its own.
    """
    seen: list[list[StorageWeakRef]] = []  # weak: memory is freed and used again as in the run that is captured

    def note(made: list[torch.Tensor]) -> None:
        seen.append([StorageWeakRef(tensor.untyped_storage()) for tensor in made])

    watched = _Allocations(after=note)
    outputs = watched.run(region, inputs)
    if outputs is None:
        return functools.partial(_all_own, region)
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    first: dict[int, int] = {}  # storage -> the allocation that it comes from
    for i, made in enumerate(seen):
        for storage in made:
            first.setdefault(storage.cdata, i)
    storages = {tensor.untyped_storage()._cdata for tensor in outputs} - given
    if not storages <= first.keys():
        return functools.partial(_all_own, region)
    return functools.partial(_routed, region, frozenset(first[storage] for storage in storages), len(seen))


def _all_own(region: CompiledGraph, own: _OwnMemory, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    own.enter()
    return region(*inputs)


def _routed(
    region: CompiledGraph, leaving: frozenset[int], count: int, own: _OwnMemory, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    watched = _Allocations(before=lambda i: own.enter() if i in leaving else own.leave())
    outputs = watched.run(region, inputs)
    if outputs is None or watched.count != count:
        raise RuntimeError(f"inductor's wrapper made {watched.count} allocations, at first {count}")
    return outputs


class _Allocations(TorchDispatchMode):
    """Counts what may allocate while a compiled region runs: allocations of its wrapper's own, and operators."""

    def __init__(
        self,
        before: Callable[[int], None] = lambda i: None,
        after: Callable[[list[torch.Tensor]], None] = lambda made: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self._before, self._after = before, after
        self.count = 0

    def run(self, region: CompiledGraph, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """The region's outputs, or None where its wrapper cannot be looked into."""
        hooked = region.hooked(lambda empty: functools.partial(self._make, empty))
        if hooked is None:
            return None
        with self:
            return hooked(*inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._make(func, *args, **(kwargs or {}))

    def _make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before(self.count)
        self.count += 1
        result = function(*args, **kwargs)
        self._after([leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result


def _after_failure(graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
    """Note [After a failed capture]

    ``CUDAGraph::capture_end`` throws right after the driver has ended an invalidated capture, before it tells the
    allocators and the registered generators that the capture is over (torch 2.11:
    ``aten/src/ATen/cuda/CUDAGraph.cpp``). What is then left:

    * every random op outside of a capture raises "Offset increment outside graph capture encountered unexpectedly": a
      harmless capture takes the generators through the whole course once more;
    * the allocators refuse the next capture into the pool ("already recording to mempool_id"), and the one for pinned
      memory cannot be told from Python: the pool goes on with another handle, which only means another place for
      scratch;
    * the allocator for pinned memory keeps a callback into the graph object: the object is kept.
    """
    _FAILED.append(graph)
    with contextlib.suppress(RuntimeError):  # raises where capture_end did get that far
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    _harmless_capture(pool.device, None).reset()
    pool.renew()


_FAILED: list[torch.cuda.CUDAGraph] = []


def _harmless_capture(device: torch.device, handle: Any) -> torch.cuda.CUDAGraph:
    """A graph with one small kernel, captured into a pool."""
    graph = torch.cuda.CUDAGraph()
    with exclusive(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        scratch = torch.zeros(1, device=device)
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        scratch.zero_()
        graph.capture_end()
    return graph


class CudaRegion(CapturedRegion):
    """One CUDA graph and the buffers that it writes."""

    def __init__(
        self, pool: CudaPool, graph: torch.cuda.CUDAGraph, own: _OwnMemory, outputs: tuple[torch.Tensor, ...]
    ) -> None:
        self.outputs = outputs
        self.own = own
        self._pool, self._graph = pool, graph
        self.released = False

    def replay(self) -> None:
        assert not self.released, "replay of a released region"
        self._pool.order()
        self._graph.replay()

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.outputs = ()
            if self._pool.last is not None:
                self._pool.last.synchronize()  # a replay may still be running
            self._graph.reset()
            self.own.release()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()
