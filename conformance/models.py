"""Whole models: three training steps through an entry, against eager."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxgraph

from . import compare, trial
from .compare import Strictness
from .entries import Entry, resolve
from .outcomes import Outcome, Row, describe, refusal
from .zoo import ZOO, NotInstalled, Spec

STEPS = 3
SLACK = 10
"""Where eager's runs differ among themselves, a graphed run may differ from eager by this many times that gap."""
_NOT_REPEATABLE = f"eager is not repeatable: {SLACK} times its own gap allowed"

OPTIMIZERS = ("foreach", "fused", "capturable")
"""AdamW's implementations; ``capturable`` (with ``foreach``) is for CUDA."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table to be."""

    model: str
    precision: str
    optimizer: str
    entry: str

    @property
    def key(self) -> str:
        """The row's name in a results file."""
        return "/".join(("model", self.model, self.precision, self.optimizer, self.entry))


def cases(
    precisions: Sequence[str], optimizers: Sequence[str], entries: Sequence[str], only: Sequence[str] = ()
) -> Iterator[Case]:
    """All cases; ``only`` names models, or libraries, to take (all if empty)."""
    names = [name for name in ZOO if not only or name in only or name.partition(":")[0] in only]
    if not names:
        raise ValueError(f"no such model: {sorted(only)}; there are {sorted(ZOO)}")
    for name in names:
        for precision in precisions:
            for optimizer in optimizers:
                yield from (Case(name, precision, optimizer, entry) for entry in entries)


@dataclasses.dataclass
class Training:
    """A module in training on fixed batches."""

    module: nn.Module
    spec: Spec
    batches: list[Any]
    device: str
    precision: str
    optimizer: str
    call: Callable[..., Any] | None = None  # in place of the module's own, after graphing
    compiling: bool = False  # code of the module that asks is told that it is being compiled, as Dynamo tells it
    asked: bool = False  # and it has asked
    nudged: bool = False  # every gradient moves to a neighbouring number, up or down

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision's context."""
        if self.precision == "bf16":
            return torch.autocast(self.device, torch.bfloat16)
        return contextlib.nullcontext()

    def forward(self, batch: Any) -> Any:
        """The outputs for a copy of a batch."""
        args, kwargs = compare.copy_of(batch)
        with self.autocast(), self._told_of_compiling() if self.compiling else contextlib.nullcontext():
            return (self.module if self.call is None else self.call)(*args, **kwargs)

    def train(self) -> Iterator[tuple[str, Any]]:
        """Three steps with AdamW, clipping and a scheduler; gives all that must equal eager's, under its name."""
        fused, capturable = self.optimizer == "fused", self.optimizer == "capturable"
        foreach = not fused
        optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=1e-3, foreach=foreach, fused=fused, capturable=capturable
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            outputs = self.forward(self.batches[step])
            loss = self.spec.loss(outputs)
            optimizer.zero_grad(set_to_none=step != 1)
            loss.backward()
            if self.nudged:
                _nudge(self.module)
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), 1.0, foreach=foreach)
            gradients = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
            optimizer.step()
            scheduler.step()
            tensors = [t.detach() for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
            yield f"outputs of step {step + 1}", [t.clone() for t in tensors]
            yield f"loss of step {step + 1}", loss.detach().clone()
            yield f"gradient norm of step {step + 1}", norm.detach().clone()
            yield f"gradients of step {step + 1}", gradients
            yield f"buffers after step {step + 1}", {n: b.clone() for n, b in self.module.named_buffers()}
            yield f"random state after step {step + 1}", trial.random_state(self.device)
        yield "parameters", {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def seconds(self, repetitions: int) -> float:
        """Median time of a forward with its backward."""
        times = []
        for _ in range(repetitions + 2):  # two to warm up
            self.module.zero_grad(set_to_none=True)
            self._wait()
            began = time.perf_counter()
            self.spec.loss(self.forward(self.batches[0])).backward()
            self._wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    @contextlib.contextmanager
    def _told_of_compiling(self) -> Iterator[None]:
        def yes() -> bool:
            self.asked = True
            return True

        was = torch.compiler.is_compiling
        torch.compiler.is_compiling = yes
        try:
            yield
        finally:
            torch.compiler.is_compiling = was

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _nudge(module: nn.Module) -> None:
    """Move every element of the gradients by one unit in the last place, up or down as it comes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.grad is not None:
            up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
            towards = torch.where(up, float("inf"), float("-inf")).to(parameter.dtype)
            parameter.grad.copy_(torch.nextafter(parameter.grad, towards))


@contextlib.contextmanager
def _peak(device: str, row: Row, name: str) -> Iterator[None]:
    """Writes the peak of allocated memory into the row, in MiB; CUDA only."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield
    if device == "cuda":
        row[name] = round(torch.cuda.max_memory_allocated() / 2**20, 1)


def _batches(spec: Spec, device: str) -> list[Any]:
    made = []
    for step in range(STEPS):
        torch.manual_seed(10 + step)
        made.append(pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), spec.batch()))
    return made


def run(case: Case, device: str, timing: int, entry: Entry | None = None, report: trial.Report = lambda _: None) -> Row:
    """Run a case; gives its row.

    Args:
        case: what to run.
        device: ``cpu`` or ``cuda``.
        timing: repetitions for the speed-up; 0 for none.
        entry: in place of the one that the case names.
        report: told where the case stands.
    """
    began = time.monotonic()
    row: Row = {"case": case.key, **dataclasses.asdict(case)}
    entry = resolve(case.entry) if entry is None else entry
    spec = ZOO[case.model]
    report("eager")
    try:
        torch.manual_seed(0)
        module = spec.build().to(device).train()
    except NotInstalled as error:
        return {**row, "outcome": Outcome.NOT_INSTALLED.value, "reasons": {str(error)[:300]: 1}}

    def training(**how: Any) -> Training:
        batches = _batches(spec, device)
        return Training(copy.deepcopy(module), spec, batches, device, case.precision, case.optimizer, **how)

    reference = training()
    try:
        with _peak(device, row, "eager_peak_mib"):
            expected = dict(reference.train())
        again = dict(training().train())
    except Exception as error:  # eager's own: nothing to compare with
        return {**row, "outcome": Outcome.SKIPPED.value, "reasons": {describe(error): 1}}
    others = [] if compare.difference(again, expected, "", Strictness.BITS) is None else [again]
    row["notes"] = {_NOT_REPEATABLE: 1} if others else {}

    result = _graphed(training(), entry, expected, others, row, report)
    if result.outcome is Outcome.WRONG and device != "cpu":
        report("eager, again")  # atomics may come in the same order twice
        more = (dict(training().train()) for _ in range(trial.MORE_RUNS))
        found = [run for run in more if compare.difference(run, expected, "", Strictness.BITS) is not None]
        if found:
            others, row["notes"][_NOT_REPEATABLE] = others + found, 1
            result = _graphed(training(), entry, expected, others, row, report)
    exact = not others
    if result.outcome is Outcome.WRONG:
        # Dynamo reads the branch that the model takes where it asks whether it is compiled: eager can take it, too.
        report("eager, told that it is compiled")
        told = training(compiling=True)
        compiled = dict(told.train())
        if told.asked and not (exact and compare.difference(compiled, expected, "", Strictness.BITS) is None):
            row["notes"][
                "compared with eager where torch.compiler.is_compiling() is true, as the model asks for it"
            ] = 1
            expected = compiled
            result = _graphed(training(), entry, expected, others, row, report)
        if result.outcome is Outcome.WRONG and exact and row["captures"] > 1:
            # Gradients of what several parts use come on several ways, and their sum rounds otherwise (README, Limits).
            report("eager, gradients nudged")
            others = [dict(training(compiling=expected is compiled, nudged=True).train())]
            row["notes"][f"parts add gradients in another order: {SLACK} times what their last bit makes in eager"] = 1
            result = _graphed(training(), entry, expected, others, row, report)
    if result.outcome is not Outcome.EQUAL:
        if result.outcome.is_failure:
            report("control")
            row["notes"] |= dict.fromkeys(control(training, expected, others), 1)
        return {**row, "outcome": result.outcome.value, "reasons": {result.why: 1}}
    row["reasons"] = dict.fromkeys(result.reasons, 1)
    outcome = Outcome.EAGER if result.reasons else Outcome.EQUAL if row["replays"] >= STEPS else Outcome.UNSTATED
    row["outcome"] = outcome.value
    if timing:
        report("timing")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row["speedup"] = round(reference.seconds(timing) / result.training.seconds(timing), 2)
    trial.collect()
    row["seconds"] = round(time.monotonic() - began, 2)
    return row


@dataclasses.dataclass
class _Result:
    training: Training
    outcome: Outcome
    why: str
    reasons: list[str]


def _graphed(
    mine: Training, entry: Entry, expected: dict[str, Any], others: Sequence[Any], row: Row, report: trial.Report
) -> _Result:
    """Graph and train; the row gets the counts, also of what failed."""
    report("graphed")
    trial.collect()
    torch._dynamo.utils.counters.clear()
    before = fxgraph.stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _peak(mine.device, row, "graphed_peak_mib"):
            outcome, why = attempt(mine, entry, expected, others)
    after = fxgraph.stats()
    row["captures"] = len(after.captures) - len(before.captures)
    row["replays"] = after.replays - before.replays
    row["pool_mib"] = round((after.pool_bytes - before.pool_bytes) / 2**20, 2)
    return _Result(mine, outcome, why, trial.stated_reasons(before, after, caught))


def attempt(mine: Training, entry: Entry, expected: dict[str, Any], others: Sequence[Any]) -> tuple[Outcome, str]:
    """Graph and train; equal, or how it failed."""
    try:
        with mine.autocast():
            mine.call = entry(mine.module, *compare.copy_of(mine.batches[0]))
        for name, found in mine.train():
            gap = _difference(name, found, expected[name], [run[name] for run in others])
            if gap is not None:
                return Outcome.WRONG, gap
    except Exception as error:  # whatever the entry raises is the outcome: a refusal or a crash
        refused = refusal(error)
        if refused is None:
            return Outcome.CRASH, describe(error)
        return Outcome.REFUSED, f"[{refused.id}] {refused.title}: {refused.observed}"[:300]
    return Outcome.EQUAL, ""


def control(training: Callable[[], Training], *reference: Any) -> Iterator[str]:
    """What Dynamo alone, and torch's own tracing without capture, make of the same training."""
    for backend in ("eager", "aot_eager"):
        trial.collect()

        def entry(target: Any, args: Any, kwargs: Any, backend: str = backend) -> Any:
            return torch.compile(target, backend=backend)

        outcome, why = attempt(training(), entry, *reference)
        yield f"backend={backend!r}: {outcome.value} {why}".strip()


def _difference(name: str, found: Any, expected: Any, others: Sequence[Any]) -> str | None:
    """Where two values differ, by more than ``SLACK`` times the gap to ``others``, which eager gave too."""
    if not others:
        return compare.difference(found, expected, name, Strictness.EQUAL)
    gap = compare.difference(found, expected, name, Strictness.SHAPES)
    if gap is not None:
        return gap
    trees = (pytree.tree_leaves(tree) for tree in (found, expected, *others))
    for one, other, *more in zip(*trees, strict=True):
        default = torch.testing._comparison.get_tolerances(one, other, rtol=None, atol=None)
        allowed = SLACK * max(_distance(other, run) for run in more)
        allowed += default[1] + default[0] * _distance(other, torch.zeros_like(other))
        if not _distance(one, other) <= allowed:
            return f"{name}: differs by {_distance(one, other):.3g}, allowed {allowed:.3g}"
    return None


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
