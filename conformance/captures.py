"""What a CUDA graph really does with each op of torch's database, and what our rules say about the same op.

Raw: the op and its backward inside of ``torch.cuda.graph``, without anything of fxgraph; replayed on the sample's
values and on others, each time compared with eager. Verdict: ``passes.check`` on the op's graphs. Where the two differ,
a rule is too strict or too lax.

What is allowed is a graph of ATen ops, not the op: the bare op may make a constant on the CPU, which fxgraph moves, or
have a derivative that reads values, other than the one for fake tensors. So the graph of an op that is allowed is
captured as well, by fxgraph's engine, and first: what a failed capture leaves behind would show in the next one. Where
it fails, the bare op is not tried.

Without a GPU the place of ``torch.cuda.graph`` is taken by fxgraph's CPU engine: it has no streams that a read on the
host could break, so only what is allowed and fails, or is wrong on replay, says something there.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import passes
from fxgraph import engines, trace
from fxgraph._torch_compat.dynamo import DATA_IN_GRAPH
from fxgraph._torch_compat.tracing import tracing
from fxgraph.engines.base import exclusive
from fxgraph.errors import TraceError

from . import compare, ops
from .compare import Strictness
from .outcomes import Row, describe

CAPTURES, WRONG, FAILS, SKIPPED = "captures", "wrong on replay", "fails", "skipped"
"""What comes of a raw capture; ``WRONG``, ``FAILS`` and ``SKIPPED`` are followed by a colon and the reason."""

AGREE, STRICTER, LAXER = "agree", "stricter", "laxer"
"""How the verdict compares with the raw capture: ``STRICTER`` refuses what captures and replays right, ``LAXER``
allows what does not."""

NO_GRAPH = "no-graph"
"""Stands among the rule ids where no tracer gives a graph of ATen ops that could be judged."""

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16)
"""The first of these that an op takes is its dtype, float32 for almost all."""

RETIRE = "retire"
"""Key of a row after which its process is not to be used: what a failed capture leaves behind (generators that believe
that they still capture, a pool that does) would show in the ops after it."""


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """An op in one dtype."""

    op: str
    dtype: str

    @property
    def key(self) -> str:
        """The row's name in a results file."""
        return f"capture/{self.op}/{self.dtype}"


def dtype_of(op: Any, device: str) -> torch.dtype:
    """Float32, else the first dtype that the op takes on this device."""
    supported = op.supported_dtypes(device)
    others = sorted(supported, key=str)
    return next(dtype for dtype in (*DTYPES, *others) if dtype in supported)


def cases(device: str, only: Sequence[str] = ()) -> Iterator[Case]:
    """All ops of the database that the device has, in its order; ``only`` names those to take (all if empty).

    Raises:
        ValueError: if a name is none of the database's.
    """
    known = ops.database()
    unknown = set(only) - {op.name for op in known.values()} - set(known)
    if unknown:
        raise ValueError(f"not in torch's op database: {sorted(unknown)}")
    for name, op in known.items():
        if (not only or name in only or op.name in only) and op.supported_dtypes(device):
            yield Case(name, str(dtype_of(op, device)).removeprefix("torch."))


# -- one sample as a function of its tensors --------------------------------------------------------------------------


class Step:
    """An op's forward and, where it has gradients, backward: flat tensors in, flat tensors out.

    Args:
        function: the op.
        sample: of the database.
        backward: whether to differentiate.
    Attributes:
        values: the sample's tensors, detached.
        constants: the results of the last call that are no tensors.
    """

    def __init__(self, function: Callable[..., Any], sample: Any, *, backward: bool) -> None:
        self._function = function
        self._select = sample.output_process_fn_grad
        self._leaves, self._spec = flat(sample)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self._wanted = [self._leaves[i].requires_grad and backward for i in self._places]
        self.values = [self._leaves[i].detach() for i in self._places]
        self.constants: list[Any] = []

    @property
    def differentiates(self) -> bool:
        """Whether any input's gradient is asked for."""
        return any(self._wanted)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The op's arguments with these tensors in the places of the sample's."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def leaves_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of autograd's own that share memory with these."""
        return [
            tensor.detach().requires_grad_() if wanted else _alias(tensor)
            for tensor, wanted in zip(tensors, self._wanted, strict=True)
        ]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = self.leaves_of(tensors)
        args, kwargs = self.arguments(inputs)
        outputs = self._function(*args, **kwargs)
        results = pytree.tree_leaves(outputs)
        gradients: Sequence[torch.Tensor | None] = ()
        sources = [tensor for tensor, wanted in zip(inputs, self._wanted, strict=True) if wanted]
        starts = [
            leaf
            for leaf in (pytree.tree_leaves(self._select(outputs)) if sources else ())
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout == torch.strided
        ]
        if starts:
            gradients = torch.autograd.grad(starts, sources, [_cotangent(t) for t in starts], allow_unused=True)
        self.constants = [leaf for leaf in results if not isinstance(leaf, torch.Tensor)]
        return tuple(leaf.detach() for leaf in (*results, *gradients) if isinstance(leaf, torch.Tensor))


def flat(sample: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a sample's arguments."""
    return pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    # Not detach(), which would forbid resize_.
    return torch.ops.aten.alias.default(tensor) if tensor.layout == torch.strided else tensor


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Made inside of the step, since its size may depend on values; not constant, else softmax has no gradient."""
    ramp = torch.arange(output.numel(), device=output.device) % 7 + 1
    return ramp.to(output.dtype).reshape(output.shape)


# -- raw captures -----------------------------------------------------------------------------------------------------

Captured = tuple[Sequence[torch.Tensor], Callable[[], None]]
"""The buffers that a replay writes, and what replays."""


def capture_cuda(step: Step, statics: Sequence[torch.Tensor]) -> Captured:
    """The step in a CUDA graph of its own, as torch's documentation says: warmed up on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(*statics)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    first: Exception | None = None
    try:
        # Without the garbage collector: the end of an old graph would spoil the capture.
        with exclusive(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                outputs = step(*statics)
            except Exception as error:  # the end of the capture raises, too: only that it was invalidated
                first = error
                raise
    except Exception:  # goes on as it is, or as the error that came before it
        if first is not None:
            raise first from None
        raise

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return outputs, replay


def capture_graph(graph: fx.GraphModule | None, statics: Sequence[torch.Tensor], device: str) -> Captured:
    """The step's ATen graph in a region of fxgraph's engine for that device.

    Raises:
        RuntimeError: if there is no graph.
    """
    if graph is None:
        raise RuntimeError("no graph of ATen ops")
    engine = engines.get(device)
    # Graphs of make_fx call nothing but ops and give a tuple of tensors, which is what an engine wants.
    region = engine.capture(engine.new_pool(torch.device(device)), graph, statics, warmup=1)

    def replay() -> None:
        region.replay()
        if device == "cuda":
            torch.cuda.synchronize()

    return region.outputs, replay


def refill(statics: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Put values into the tensors that a graph reads.

    Where the memory behind a tensor is laid out alike it is written as a whole: an op may look at more of it than the
    tensor shows (``as_strided``), and elements that share memory are written once.
    """
    for static, value in zip(statics, values, strict=True):
        if static.layout == torch.strided and _memory_of(static) == _memory_of(value):
            static.untyped_storage().copy_(value.untyped_storage())
        else:
            static.copy_(value)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.untyped_storage().nbytes(), tensor.storage_offset(), tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())


def copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with all the memory behind them; of sparse tensors, which have no memory of their own, clones."""
    strided: list[torch.Tensor] = compare.copy_of([value for value in values if value.layout == torch.strided])
    dense = iter(strided)
    return [next(dense) if value.layout == torch.strided else value.clone() for value in values]


@dataclasses.dataclass
class Eager:
    """What eager gives: tensors and constants."""

    tensors: tuple[torch.Tensor, ...]
    constants: list[Any]

    def difference(self, other: Eager, strictness: Strictness) -> str | None:
        """Where this differs from another run first."""
        mine, its = [list(self.tensors), self.constants], [list(other.tensors), other.constants]
        return compare.difference(mine, its, "result", strictness)


def run_eager(step: Step, values: Sequence[torch.Tensor], seed: int) -> Eager:
    """The step on copies of these values."""
    torch.manual_seed(seed)
    return Eager(step(*copies(values)), step.constants)


def strictness_of(step: Step, values: Sequence[torch.Tensor], expected: Eager, has_values: bool) -> Strictness:
    """How a replay can be compared: by shape alone where eager is random, else within assert_close's tolerance.

    Bits are not asked for: a stale value is another random number, far beyond another order of additions.
    """
    if not has_values:
        return Strictness.SHAPES
    repeats = all(run_eager(step, values, seed).difference(expected, Strictness.CLOSE) is None for seed in (1, 2))
    return Strictness.CLOSE if repeats else Strictness.SHAPES


def others(step: Step, fresh: Any) -> list[torch.Tensor] | None:
    """The tensors of another sample if they fit into the places of this one's."""
    values = [leaf.detach() for leaf in flat(fresh)[0] if isinstance(leaf, torch.Tensor)]
    fit = len(values) == len(step.values) and all(
        (a.shape, a.dtype, a.layout, a.device, a.stride() if a.layout == torch.strided else None)
        == (b.shape, b.dtype, b.layout, b.device, b.stride() if b.layout == torch.strided else None)
        for a, b in zip(values, step.values, strict=True)
    )
    return values if fit else None


def others_on_host(values: Sequence[torch.Tensor], by: int) -> list[torch.Tensor] | None:
    """The values with so much added in tensors of the host, if they stand beside tensors of a device.

    What a capture has read of them, a length, say, stays as it was; and samples with another seed have the same.
    """
    on_host = [value.device.type == "cpu" for value in values]
    moved = [h and v.dtype.is_signed and v.layout == torch.strided for h, v in zip(on_host, values, strict=True)]
    if not any(moved) or all(on_host):
        return None
    return [value + by if move else value for value, move in zip(values, moved, strict=True)]


def raw(
    step: Step,
    runs: Sequence[tuple[Sequence[torch.Tensor], Eager]],
    strictness: Strictness,
    capture: Callable[[Step, Sequence[torch.Tensor]], Captured],
) -> str:
    """Capture the step on the first run's values, replay on each run's, compare with what eager gave."""
    try:
        statics = copies(runs[0][0])
        outputs, replay = capture(step, statics)
        constants = step.constants
        for number, (values, expected) in enumerate(runs):
            refill(statics, values)
            torch.manual_seed(1)
            replay()
            gap = Eager(tuple(outputs), constants).difference(expected, strictness)
            if gap is not None:
                return f"{WRONG}: on {'other' if number else 'the same'} values: {gap}"
    except Exception as error:  # whatever the device raises is the outcome
        return f"{FAILS}: {describe(error)}"
    return CAPTURES


# -- verdicts ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Judged:
    """A verdict, and what it is about.

    Attributes:
        ids: of the violated rules; none: allowed.
        observed: what the rules saw.
        graph: of ATen ops, with constants of the CPU moved to the device.
        fake: whether the graph was traced on fake tensors, as fxgraph traces.
        unsafe: the op that torch's own compiler would not put into a CUDA graph, or an empty string.
        notes: what else is to be said.
    """

    ids: list[str]
    observed: list[str]
    graph: fx.GraphModule | None
    fake: bool
    unsafe: str
    notes: list[str]


def aten_graph(step: Step) -> tuple[fx.GraphModule | None, str]:
    """The step as a graph of ATen ops, traced on fake tensors, else on real ones; or None and why."""
    reason = ""
    for mode in ("fake", "real"):
        try:
            with tracing():
                tracer = make_fx(step, tracing_mode=mode, _error_on_data_dependent_ops=mode == "fake")
                return tracer(*copies(step.values)), mode
        except Exception as error:  # an op without a fake kernel, one that reads a value: tracers raise anything
            reason = describe(error)
    return None, reason


def judge(step: Step, function: Callable[..., Any]) -> Judged:
    """The verdict on the torch-level graph, as fxgraph reads and judges it first, and on that of ATen ops."""
    notes = []
    report = passes.Report()
    args, kwargs = step.arguments(step.leaves_of(copies(step.values)))
    try:
        read = trace.read(function, args, kwargs, **DATA_IN_GRAPH)
        if read.graph is not None:
            report += trace.check_torch_level(read.graph)
    except TraceError as error:
        notes.append(f"not read at torch level: [{error.id}] {error.observed}"[:200])
    except Exception as error:  # the op's own, raised while Dynamo runs it on fake tensors
        notes.append(f"not read at torch level: {describe(error)}"[:200])
    graph, mode = aten_graph(step)
    # Torch judges graphs of fake tensors only: it looks at every index's dtype.
    unsafe = get_first_incompatible_cudagraph_node(graph) if graph is not None and mode == "fake" else None
    if graph is not None:
        graph = trace.on_one_device(graph)
        report += passes.check(graph, passes.CAPTURABLE)
    ids, observed = list(report.ids), [violation.observed for violation in report.violations]
    if graph is None and not ids:
        ids, observed = [NO_GRAPH], [mode]
    said = "" if unsafe is None else str(unsafe.target)
    return Judged(ids, list(dict.fromkeys(observed))[:3], graph, mode == "fake", said, notes)


def relation(outcome: str, ids: Sequence[str], graph: str = "") -> str:
    """Whether a verdict fits to what the capture did: that of the graph, where it was tried, else that of the bare op.

    Args:
        outcome: of the bare op.
        ids: of the violated rules.
        graph: outcome of the graph that is allowed; empty: not tried.
    """
    if outcome.startswith(SKIPPED):
        return SKIPPED
    captured = (graph or outcome) == CAPTURES
    if captured == (not ids):
        return AGREE
    return STRICTER if captured else LAXER


# -- a case -----------------------------------------------------------------------------------------------------------


def samples(op: Any, device: str, dtype: torch.dtype, count: int, seed: int) -> list[Any]:
    """The first samples of an op, without those after them."""
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(seed)
    grad = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device)
    return list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=grad, set_seed=False), count))


def run_sample(
    function: Callable[..., Any],
    sample: Any,
    fresh: Any,
    device: str,
    report: Callable[[str], None],
    *,
    has_values: bool = True,
) -> dict[str, Any]:
    """One sample: eager, verdict, captures; the last may leave the process unusable.

    Args:
        function: the op.
        sample: of the database.
        fresh: the same one of another seed.
        device: ``cpu`` or ``cuda``.
        report: told where the sample stands.
        has_values: whether the result has values that can be compared.
    """
    report("eager")
    try:
        step, expected = _runnable(function, sample)
    except Exception as error:  # eager's own: nothing to compare with
        return {"raw": f"{SKIPPED}: {describe(error)}", "ids": [], "relation": SKIPPED}
    runs = [(step.values, expected)]
    notes = []
    for values in (others(step, fresh), others_on_host(step.values, -1), others_on_host(step.values, 1)):
        try:
            runs += [] if values is None else [(values, run_eager(step, values, 1))]
        except Exception as error:  # eager's own, on values that it was not made for
            notes.append(f"no other values: {describe(error)}"[:200])
    if step.values and len(runs) == 1 and not notes:
        notes.append("no other values of the same shapes")
    strictness = strictness_of(step, step.values, expected, has_values)
    report("verdict")
    judged = judge(step, function)
    report(f"capture; verdict: {', '.join(judged.ids) or 'allowed'}")

    def of_graph(_: Step, statics: Sequence[torch.Tensor]) -> Captured:
        return capture_graph(judged.graph, statics, device)

    graph = ""
    if device == "cpu":
        outcome = raw(step, runs, strictness, of_graph)
    else:
        if not judged.ids and judged.fake:
            graph = raw(step, runs, strictness, of_graph)
        failed = graph.startswith(FAILS)
        outcome = f"{FAILS}: not tried after its graph" if failed else raw(step, runs, strictness, capture_cuda)
    return {
        "raw": outcome,
        "graph": graph,
        "ids": judged.ids,
        "observed": judged.observed,
        "relation": relation(outcome, judged.ids, graph),
        "unsafe": judged.unsafe,
        "backward": step.differentiates,
        "compared": strictness.name.lower(),
        "notes": notes + judged.notes,
    }


def _runnable(function: Callable[..., Any], sample: Any) -> tuple[Step, Eager]:
    """The sample's step and what eager gives, without the backward where eager has none."""
    step = Step(function, sample, backward=True)
    try:
        return step, run_eager(step, step.values, 1)
    except Exception:  # eager's own: tried without the backward, else raised again
        if not step.differentiates:
            raise
    step = Step(function, sample, backward=False)
    return step, run_eager(step, step.values, 1)


def run(case: Case, device: str, count: int, report: Callable[[str], None] = lambda _: None) -> Row:
    """Run a case; gives its row, whose ``outcome`` is the worst relation of its samples.

    Args:
        case: what to run.
        device: ``cpu`` or ``cuda``.
        count: samples per op; none is begun after a capture that failed.
        report: told where the case stands.
    """
    began = time.monotonic()
    op = ops.database()[case.op]
    row: Row = {"case": case.key, **dataclasses.asdict(case), "samples": []}
    report("samples: eager")
    try:
        chosen = zip(*(samples(op, device, getattr(torch, case.dtype), count, seed) for seed in (1, 2)), strict=False)
    except Exception as error:  # the database's own code; a device without some library, say
        chosen = iter(())
        row["samples"] = [{"raw": f"{SKIPPED}: {describe(error)}", "ids": [], "relation": SKIPPED}]
    for number, (sample, fresh) in enumerate(chosen):

        def say(stage: str, at: int = number) -> None:
            report(f"sample {at}: {stage}")

        function = ops.function_for(op, "function")
        has_values = op.name not in ops.NO_VALUES
        row["samples"].append(
            {"sample": number, **run_sample(function, sample, fresh, device, say, has_values=has_values)}
        )
        said = row["samples"][-1]["raw"]
        if device == "cuda" and (said.startswith(FAILS) or "CUDA error" in said):
            row[RETIRE] = True
            break
    torch._dynamo.reset()
    relations = [sample["relation"] for sample in row["samples"]]
    row["outcome"] = next((r for r in (LAXER, STRICTER, AGREE) if r in relations), SKIPPED)
    row["seconds"] = round(time.monotonic() - began, 2)
    return row
