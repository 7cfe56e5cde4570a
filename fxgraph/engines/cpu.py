"""The CPU engine: CUDA graphs' semantics without a GPU, and the default where there is none.

Capture runs the region once, op by op, and keeps every value at the address where it came to lie. A replay runs the
recorded ops again, into the same memory: through the op's ``out=`` form where it has one, else by copying the result.
Views are made once, at capture; they cost nothing in a replay.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch_compat.autograd import kernels_only
from .base import CapturedRegion, Engine, Pool, Region, aten_graph, empty_like_layout, exclusive, poison_value

POISON = False
"""Debug switch (tests set it): fill a slot's buffers with poison when the slot is given back."""


class CpuPool(Pool):
    """Counts the bytes of the regions captured into it; host memory needs no pool of its own."""

    def __init__(self, handle: object = None) -> None:
        self._handle = handle if handle is not None else object()
        self.regions: list[CpuRegion] = []

    @property
    def handle(self) -> object:
        return self._handle

    def bytes_held(self) -> int:
        storages = {s.data_ptr(): s.nbytes() for region in self.regions for s in region.storages()}
        return sum(storages.values())

    def trim(self) -> None:
        """Host memory has gone back with the last tensor."""


class CpuEngine(Engine):
    """See the module's text."""

    name = "cpu"

    def new_pool(self, device: torch.device, handle: object = None) -> CpuPool:
        return CpuPool(handle)

    def empty(self, pool: Pool, like: torch.Tensor) -> torch.Tensor:
        return empty_like_layout(like, like.device)

    def capture(self, pool: Pool, region: Region, inputs: Sequence[torch.Tensor], warmup: int) -> CpuRegion:
        assert isinstance(pool, CpuPool), "a pool of another engine"
        with exclusive(), kernels_only():
            module = aten_graph(region, inputs)
            for _ in range(warmup):
                module(*inputs)
            recorder = _Recorder(module)
            outputs = tuple(recorder.run(*inputs))
            captured = CpuRegion(pool, tuple(recorder.calls), outputs, recorder.buffers)
        pool.regions.append(captured)
        return captured

    @property
    def poisons(self) -> bool:
        return POISON

    def poison(self, tensors: Sequence[torch.Tensor]) -> None:
        if POISON:
            for tensor in tensors:
                if not torch._debug_has_internal_overlap(tensor):
                    tensor.detach().fill_(poison_value(tensor.dtype))


class CpuRegion(CapturedRegion):
    """Recorded calls and the buffers they write."""

    def __init__(
        self,
        pool: CpuPool,
        calls: tuple[Callable[[], Any], ...],
        outputs: tuple[torch.Tensor, ...],
        buffers: list[torch.Tensor],
    ) -> None:
        self.outputs = outputs
        self._pool, self._calls, self._buffers = pool, calls, buffers
        self._released = False

    def storages(self) -> list[torch.UntypedStorage]:
        return [buffer.untyped_storage() for buffer in self._buffers]

    def replay(self) -> None:
        assert not self._released, "replay of a released region"
        with kernels_only():
            for call in self._calls:
                call()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._pool.regions.remove(self)
            self._calls, self._buffers, self.outputs = (), [], ()


class _Recorder(fx.Interpreter):
    """Runs a graph once and notes the calls that a replay has to make again."""

    def __init__(self, region: fx.GraphModule) -> None:
        super().__init__(region, garbage_collect_values=False)
        self.calls: list[Callable[[], Any]] = []
        self.buffers: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        self._needs_workspace = n.target is torch.ops.aten.mkldnn_rnn_layer.default and len(n.users) > _RNN_RESULTS
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._needs_workspace:
            target = torch.enable_grad()(target)  # the kernel asks grad mode whether to keep one for its backward
        result = target(*args, **kwargs)
        if target is operator.getitem:
            return result
        outs = [out for out in pytree.tree_leaves(result) if isinstance(out, torch.Tensor)]
        given = {
            t.untyped_storage().data_ptr(): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        fresh = [out for out in outs if out.untyped_storage().data_ptr() not in given or out.numel() == 0]
        mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        if mutates:
            self.calls.append(functools.partial(target, *args, **kwargs))
        elif len(fresh) < len(outs):
            if fresh:
                raise RuntimeError(f"{target} returns both new memory and memory of its inputs")
        elif outs and target not in _NO_VALUES:
            self.buffers += outs
            self.calls.append(_again(target, args, kwargs, result, outs))
        return result

    call_method = None  # type: ignore[assignment]  # aten graphs have none


_RNN_RESULTS = 3  # of mkldnn_rnn_layer without the workspace: output, hidden state, cell state

# Ops whose result has no defined value: memory is all they give, and the memory is kept.
_NO_VALUES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


def _again(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, outs: list[torch.Tensor]
) -> Callable[[], Any]:
    """A call that computes the op again into the memory of its first results."""
    found = _out_form(target) if isinstance(target, torch._ops.OpOverload) else None
    whole = len(outs) == len(pytree.tree_leaves(result))  # an unused result may be None, which no out= form takes
    if found is not None and whole and not any(map(torch._debug_has_internal_overlap, outs)):
        form, names, dropped = found
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        call = functools.partial(form, *args, **kept)
        if _gives(call, names, outs, compare=torch.Tag.nondeterministic_seeded not in target.tags):
            return functools.partial(call, **dict(zip(names, outs, strict=True)))
    if isinstance(result, torch.Tensor):
        return lambda: result.copy_(target(*args, **kwargs))

    def recompute() -> None:
        results = pytree.tree_leaves(target(*args, **kwargs))
        for out, new in zip(outs, [new for new in results if new is not None], strict=True):
            out.copy_(new)

    return recompute


def _gives(call: Callable[..., Any], names: Sequence[str], outs: Sequence[torch.Tensor], compare: bool) -> bool:
    """Whether an ``out=`` form gives the values of the functional one, into the memory that it is given."""
    memory = [torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device=out.device) for out in outs]
    places = [(tensor.data_ptr(), tensor.size(), tensor.stride()) for tensor in memory]
    try:
        call(**dict(zip(names, memory, strict=True)))
    except RuntimeError:
        return False
    if [(tensor.data_ptr(), tensor.size(), tensor.stride()) for tensor in memory] != places:
        return False
    return not compare or all(_same_bits(one, other) for one, other in zip(memory, outs, strict=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*[tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)])


@functools.cache
def _out_form(target: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...], tuple[str, ...]] | None:
    """The overload of the same op that writes into given memory, its ``out`` arguments, and arguments that it lacks."""
    arguments = [(a.name, str(a.type)) for a in target._schema.arguments]
    if target is torch.ops.aten.binary_cross_entropy.default:
        return None  # which puts the losses into ``out``, resized, before it sums them up; torch complains on stderr
    if not all(str(r.type) == "Tensor" for r in target._schema.returns):
        return None
    for dropped in ((), _ALLOCATION):
        wanted = [pair for pair in arguments if pair[0] not in dropped]
        for name in target.overloadpacket.overloads():
            overload = getattr(target.overloadpacket, name)
            outs = tuple(a.name for a in overload._schema.arguments if a.is_out)
            rest = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
            if rest == wanted and len(outs) == len(target._schema.returns):
                return overload, outs, tuple(dropped)
    return None


_ALLOCATION = ("dtype", "layout", "device", "pin_memory")
