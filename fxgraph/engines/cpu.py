"""The CPU engine: CUDA graphs' semantics without a GPU, and the default where there is none.

Capture runs the region op by op, and keeps every value at the address where it came to lie. A replay runs the
recorded ops again, into the same memory: through the op's ``out=`` form where it has one, else by copying the result.
Views are made once, at capture; they cost nothing in a replay.

Calling an op from Python costs as much as what eager does around its kernel. So a replay leaves runs of well-known ops
to torch's own interpreter (:mod:`fxgraph._torch_compat.interpreter`), one call from Python for all of them.

A region that inductor has compiled is recorded likewise: the kernels and operators that its wrapper calls, on the
buffers that it has allocated, without the wrapper's own checks, allocations and views. Where the wrapper calls
something unknown, a replay calls it as it is and copies what it returns.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch_compat import interpreter
from .._torch_compat.autograd import kernels_only
from .._torch_compat.inductor import CompiledGraph
from .._torch_compat.interpreter import OperatorCall
from .base import (
    CapturedRegion,
    Engine,
    Pool,
    Region,
    aten_graph,
    blaming,
    empty_like_layout,
    exclusive,
    poison_value,
)
from .reuse import share_memory

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
            module = region if isinstance(region, CompiledGraph) else aten_graph(region, inputs)
            for _ in range(warmup):
                module(*inputs)
            tape = _Tape()
            if isinstance(module, CompiledGraph):
                outputs = _record_compiled(module, tape, inputs)
            else:
                outputs = tuple(_Recorder(module, tape).run(*inputs))
            share_memory(tape.calls, tape.buffers, [*inputs, *outputs])
            calls = _bind(tape.calls)
            with interpreter.as_written():
                for call in calls:
                    call()
            captured = CpuRegion(pool, calls, outputs, tape.buffers)
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


class _Tape:
    """The calls that a replay has to make again, and the memory that they write."""

    def __init__(self) -> None:
        self.calls: list[OperatorCall] = []
        self.buffers: list[torch.Tensor] = []

    def note(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call that has been made, and what it returned."""
        outs = [out for out in pytree.tree_leaves(result) if isinstance(out, torch.Tensor)]
        given = {
            t.untyped_storage().data_ptr(): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        fresh = [out for out in outs if out.untyped_storage().data_ptr() not in given or out.numel() == 0]
        mutates = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        if mutates:
            new = tuple([out if any(out is one for one in fresh) else None for out in pytree.tree_leaves(result)])
            self.buffers += fresh
            self.calls.append(OperatorCall(target, args, kwargs, new if fresh else ()))
        elif len(fresh) < len(outs):
            if fresh:
                raise RuntimeError(f"{target} returns both new memory and memory of its inputs")
        elif isinstance(target, torch._ops.OpOverload) and not target._schema.returns:
            self.calls.append(OperatorCall(target, args, kwargs, ()))  # an assertion
        elif outs and target not in _NO_VALUES:
            self.buffers += outs
            self.calls.append(_again(target, args, kwargs, result, outs))


class _Recorder(fx.Interpreter):
    """Runs a graph once and notes its calls."""

    def __init__(self, region: fx.GraphModule, tape: _Tape) -> None:
        super().__init__(region, garbage_collect_values=False)
        self._tape = tape

    def run_node(self, n: fx.Node) -> Any:
        self._needs_workspace = n.target is torch.ops.aten.mkldnn_rnn_layer.default and len(n.users) > _RNN_RESULTS
        with blaming(n):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._needs_workspace:
            target = torch.enable_grad()(target)  # the kernel asks grad mode whether to keep one for its backward
        result = target(*args, **kwargs)
        if target is not operator.getitem:
            self._tape.note(target, args, kwargs, result)
        return result

    call_method = None  # type: ignore[assignment]  # aten graphs have none


class _OperatorRecorder(TorchDispatchMode):
    """Notes the operators that are called while it is on."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tape.note(func, args, kwargs or {}, result)
        return result


def _record_compiled(region: CompiledGraph, tape: _Tape, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a compiled region once and note what its wrapper calls, or else the region itself."""

    def allocating(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any) -> torch.Tensor:
            buffer = empty(*args)
            tape.buffers.append(buffer)
            return buffer

        return allocate

    def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> None:
            function(*args)
            tape.calls.append(OperatorCall(function, args, {}))

        return launch

    hooked = region.hooked(allocating, kernel)
    if hooked is not None:
        with _OperatorRecorder(tape):
            return hooked(*inputs)
    outputs = region(*inputs)
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    fresh = tuple(None if out.untyped_storage()._cdata in own else out for out in outputs)
    tape.buffers += [out for out in fresh if out is not None]
    tape.calls.append(OperatorCall(region, tuple(inputs), {}, fresh))
    return outputs


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
) -> OperatorCall:
    """A call that computes the op again into the memory of its first results."""
    leaves = pytree.tree_leaves(result)
    found = _out_form(target) if isinstance(target, torch._ops.OpOverload) else None
    whole = len(outs) == len(leaves)  # an unused result may be None, which no out= form takes
    if found is not None and whole and not any(map(torch._debug_has_internal_overlap, outs)):
        form, names, dropped = found
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        call = functools.partial(form, *args, **kept)
        if _gives(call, names, outs, compare=torch.Tag.nondeterministic_seeded not in target.tags):
            return OperatorCall(form, args, {**kept, **dict(zip(names, outs, strict=True))})
    return OperatorCall(
        target, args, kwargs, tuple(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    )


def _recompute(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor | None]
) -> None:
    for out, new in zip(targets, pytree.tree_leaves(target(*args, **kwargs)), strict=True):
        if out is not None:
            out.copy_(new)


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
    # clone(), since contiguous() leaves a single element the stride that it has, with which no view has another dtype
    flat = [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in (one, other)]
    return torch.equal(*[tensor.view(torch.uint8) for tensor in flat])


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


def _bind(calls: Sequence[OperatorCall]) -> tuple[Callable[[], Any], ...]:
    """What a replay calls, in order: calls of Python's, and functions that stand for several calls each."""
    bound: list[Callable[[], Any]] = []
    for plain, group in itertools.groupby(calls, _goes_to_the_interpreter):
        together = list(group)
        if plain and len(together) >= _FEWEST:
            bound.append(interpreter.interpreted(together))
        else:
            bound += map(_from_python, together)
    return tuple(bound)


_FEWEST = 4  # calls: starting the interpreter takes as long as calling two or three ops from Python


def _from_python(call: OperatorCall) -> Callable[[], Any]:
    if call.copied_to:
        return functools.partial(_recompute, call.op, call.args, call.kwargs, call.copied_to)
    return functools.partial(call.op, *call.args, **call.kwargs)


def _goes_to_the_interpreter(call: OperatorCall) -> bool:
    return isinstance(call.op, torch._ops.OpOverload) and _is_plain(call.op) and interpreter.fits(call)


@functools.cache
def _is_plain(op: torch._ops.OpOverload) -> bool:
    """Whether whatever the op raises for the values of its inputs is a ``RuntimeError``, and it runs no Python.

    For the interpreter turns every error into one. Ops that take indices raise ``IndexError``, those of linear algebra
    ``LinAlgError``, those of others anything.
    """
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten":
        return False
    overloads = [getattr(op.overloadpacket, each) for each in op.overloadpacket.overloads()]  # out= forms lack tags
    return any(torch.Tag.pointwise in each.tags for each in overloads) or name.removesuffix("_") in _PLAIN


# Those that are not tagged as pointwise.
_PLAIN = frozenset(
    (
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "mm",
        "mv",
        "dot",
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "var",
        "var_mean",
        "logsumexp",
        "cumsum",
        "argmax",
        "argmin",
        "any",
        "all",
        "cat",
        "stack",
        "copy",
        "fill",
        "zero",
        "zeros_like",
        "ones_like",
        "full",
        "full_like",
        "_to_copy",
        "constant_pad_nd",
        "slice_backward",
        "select_backward",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "native_batch_norm",
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "convolution",
        "convolution_backward",
        "avg_pool2d",
        "avg_pool2d_backward",
        "max_pool2d_with_indices",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "native_dropout",
        "bernoulli",
        "rand_like",
        "randn_like",
        "mse_loss",
        "mse_loss_backward",
    )
)
