"""Cases from torch's own op database: an op, a dtype, a way of calling it and an entry."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import compare, trial
from .entries import Entry, resolve
from .outcomes import Outcome, Row, worst

UNINITIALISED = "uninitialised memory: shapes, dtypes and strides are compared"
NO_VALUES = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "resize_": UNINITIALISED,
    "resize_as_": UNINITIALISED,
}
"""Ops whose result has no values to compare, and why. Everything else that is not repeatable is found by running eager
twice."""

VARIANTS = ("function", "inplace", "mutate")
"""``function``: the op as the database calls it. ``inplace``: its in-place form on a copy made inside the callable, so
that autograd can follow. ``mutate``: its in-place form on the argument itself, without gradients."""

INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
"""``--dtypes integer`` is the first of these that an op takes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table to be."""

    op: str
    dtype: str
    variant: str
    entry: str

    @property
    def key(self) -> str:
        """The row's name in a results file."""
        return "/".join(("op", self.op, self.dtype, self.variant, self.entry))


@functools.cache
def database() -> dict[str, Any]:
    """Torch's op database by name and variant. Takes some seconds, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")  # not all that libraries put there are modules
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            vars(module)["wrapper_set_seed"] = _without_seed
    return {op.formatted_name: op for op in op_db}


def _without_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of the database's wrapper, which seeds inside the callable: the trial sets the seeds, outside."""
    return op(*args, **kwargs)


def dtype_of(op: Any, name: str, device: str) -> torch.dtype | None:
    """The dtype that a name on the command line means for this op; None where the op does not take it."""
    supported = op.supported_dtypes(device)
    if name == "integer":
        return next((dtype for dtype in INTEGERS if dtype in supported), None)
    dtype: torch.dtype = getattr(torch, name)
    return dtype if dtype in supported else None


def cases(
    device: str, dtypes: Sequence[str], variants: Sequence[str], entries: Sequence[str], only: Sequence[str] = ()
) -> Iterator[Case]:
    """All cases, in the database's order; ``only`` names the ops to take (all if empty)."""
    unknown = set(only) - {op.name for op in database().values()} - set(database())
    if unknown:
        raise ValueError(f"not in torch's op database: {sorted(unknown)}")
    for dtype in dtypes:
        for name, op in database().items():
            if (only and name not in only and op.name not in only) or dtype_of(op, dtype, device) is None:
                continue
            for variant in variants:
                if variant == "function" or op.get_inplace() is not None:
                    yield from (Case(name, dtype, variant, entry) for entry in entries)


# -- samples ----------------------------------------------------------------------------------------------------------


def _spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` indices, the first and the last among them, evenly spread."""
    if count <= limit:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, limit - 1)) for i in range(limit)})


def _input(sample: Any) -> torch.Tensor | None:
    return sample.input if isinstance(sample.input, torch.Tensor) and sample.input.layout == torch.strided else None


def _broadcast(sample: Any) -> Any:
    """The sample with an input whose first dimension is expanded from size 1."""
    like = _input(sample)
    assert like is not None, "called for samples with a tensor input only"
    wanted = like.requires_grad
    expanded = like.detach()[:1].clone().expand(like.shape).requires_grad_(wanted)
    return sample.transform(lambda value: expanded if value is like else value)


def _empty(sample: Any) -> Any:
    """The sample with no element in the first dimension of its input and of the tensors of the same size there."""
    like = _input(sample)
    assert like is not None, "called for samples with a tensor input only"

    def shorten(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dim() == 0:
            return value
        if value.shape[0] != like.shape[0]:
            return value
        return value.detach()[:0].clone().requires_grad_(value.requires_grad)

    return sample.transform(shorten)


KINDS: dict[str, Callable[[Any], Any]] = {
    "non-contiguous": lambda sample: sample.noncontiguous(),
    "broadcast": _broadcast,
    "empty": _empty,
}
"""Made of an op's first sample with a tensor input of more than one row. Where eager raises on one, it is skipped."""


KILLS_TORCH = {("nn.functional.pdist", "empty"): "eager's backward of no rows ends in a segmentation fault"}
"""Made samples that are left out, since eager itself takes the process down with them."""


def samples(op: Any, device: str, dtype: torch.dtype, limit: int, seed: int) -> list[tuple[str, Any]]:
    """Labelled sample inputs: ``limit`` of the database's, and one of each of :data:`KINDS`."""
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(seed)
    grad = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device)
    everything = list(op.sample_inputs(device, dtype, requires_grad=grad, set_seed=False))
    chosen = [(f"sample {i}", everything[i]) for i in _spread(len(everything), limit)]
    for sample in everything:
        like = _input(sample)
        if like is not None and like.dim() and like.shape[0] > 1:
            for kind, make in KINDS.items():
                if (op.name, kind) in KILLS_TORCH:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    chosen.append((kind, make(sample)))
            break
    return chosen


def function_for(op: Any, variant: str) -> Callable[..., Any]:
    """A function of its own that calls the op."""
    target = op.op if variant == "function" else op.get_inplace()

    if variant == "function":

        def call(input: Any, *args: Any, **kwargs: Any) -> Any:
            return target(input, *args, **kwargs)

    elif variant == "inplace":

        def call(input: Any, *args: Any, **kwargs: Any) -> Any:
            copy = input.clone()
            target(copy, *args, **kwargs)
            return copy

    else:

        def call(input: Any, *args: Any, **kwargs: Any) -> Any:
            target(input, *args, **kwargs)
            return input + 1

    return call


def _call(sample: Any, variant: str, seed: int) -> trial.Call:
    if variant == "mutate":
        sample = sample.transform(lambda value: value.detach() if isinstance(value, torch.Tensor) else value)
    return trial.Call((sample.input, *sample.args), dict(sample.kwargs), seed, sample.output_process_fn_grad)


# -- a case -----------------------------------------------------------------------------------------------------------


def aot_eager(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The control: torch's own tracing, without capture."""
    del args, kwargs
    return torch.compile(target, backend="aot_eager")


def dynamo_alone(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.compile`` with a backend that does nothing: what fails so fails before any backend is called."""
    del args, kwargs
    return torch.compile(target, backend="eager")


def control(function: Callable[..., Any], calls: Sequence[trial.Call], device: str, values: bool) -> str:
    """What torch's own ``aot_eager`` backend, which traces as we do and captures nothing, makes of the same calls."""
    result = trial.compare_with_eager(function, calls, aot_eager, device, values=values)
    if result.outcome in (Outcome.WRONG, Outcome.CRASH):
        return f"aot_eager: {result.outcome.value}, {result.detail}"
    return "aot_eager: equal"


def run(case: Case, device: str, limit: int, entry: Entry | None = None, report: trial.Report = lambda _: None) -> Row:
    """Run a case; gives its row.

    Args:
        case: what to run.
        device: ``cpu`` or ``cuda``.
        limit: how many of the database's samples; see :func:`samples`.
        entry: in place of the one that the case names.
        report: told where the case stands.
    """
    began = time.monotonic()
    report("samples")
    op = database()[case.op]
    dtype = dtype_of(op, case.dtype, device)
    assert dtype is not None, f"{case.op} does not take {case.dtype} on {device}"
    entry = resolve(case.entry) if entry is None else entry
    values = op.name not in NO_VALUES
    row: Row = {"case": case.key, **dataclasses.asdict(case), "dtype": str(dtype).removeprefix("torch.")}
    try:
        first, second = (samples(op, device, dtype, limit, seed) for seed in (1, 2))
    except Exception as error:  # the database's own code; a device without some library, say
        return {**row, "outcome": Outcome.SKIPPED.value, "reasons": {trial.describe(error): 1}, "counts": {}}
    outcomes: collections.Counter[Outcome] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    notes: collections.Counter[str] = collections.Counter()
    details: list[dict[str, str]] = []
    for (label, sample), (_, fresh) in zip(first, second, strict=False):
        calls = [_call(sample, case.variant, 3), _call(fresh, case.variant, 4)]
        function = function_for(op, case.variant)
        result = trial.compare_with_eager(
            function, calls, entry, device, values=values, report=lambda stage, at=label: report(f"{at}: {stage}")
        )
        if result.outcome is Outcome.CRASH and case.entry == "compile":
            report(f"{label}: Dynamo alone")
            alone = trial.compare_with_eager(function_for(op, case.variant), calls, dynamo_alone, device, values=values)
            if (alone.outcome, alone.detail) == (result.outcome, result.detail):
                result = trial.Result(Outcome.REFUSED, f"torch.compile, whatever the backend: {result.detail}")
        outcomes[result.outcome] += 1
        reasons.update([result.detail] if result.detail and result.outcome is not Outcome.SKIPPED else [])
        notes.update(result.notes)
        if result.outcome.is_failure and len(details) < 3:
            report(f"{label}: control")
            said = control(function_for(op, case.variant), calls, device, values)
            details.append({"sample": label, "arguments": shapes(calls[0]), "detail": result.detail, "control": said})
    trial.collect()
    tried = [outcome for outcome in outcomes if outcome is not Outcome.SKIPPED]
    return {
        **row,
        "outcome": worst(tried).value,
        "counts": {outcome.value: count for outcome, count in outcomes.items()},
        "reasons": dict(reasons),
        "notes": {**dict(notes), **({NO_VALUES[op.name]: len(tried)} if not values else {})},
        "details": details,
        "seconds": round(time.monotonic() - began, 2),
    }


def shapes(call: trial.Call) -> str:
    """The arguments of a call in short: tensors by dtype, shape and stride."""

    def look(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            stride = f", stride {value.stride()}" if value.layout == torch.strided else f", {value.layout}"
            grad = ", requires grad" if value.requires_grad else ""
            return f"{dtype}{tuple(value.shape)}{'' if compare.significant_strides(value) == () else stride}{grad}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(look, value)) + "]"
        return repr(value)

    parts = [look(value) for value in call.args] + [f"{name}={look(value)}" for name, value in call.kwargs.items()]
    return ", ".join(parts)[:400]
