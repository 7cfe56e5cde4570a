"""One function, some calls: eager twice, then graphed, on the same values and the same random state."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch.utils import _pytree as pytree

import fxgraph

from . import compare
from .compare import Strictness
from .entries import Entry
from .outcomes import Outcome, describe, refusal

Report = Callable[[str], None]
"""Told where a trial stands, so that whoever watches the process knows what it died of."""


MORE_RUNS = 30
"""How often eager runs again before a difference is called one."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call, and which outputs its backward starts from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int
    differentiable: Callable[[Any], Any] = lambda output: output


@dataclasses.dataclass
class Observed:
    """What a call has done."""

    outputs: Any
    gradients: list[torch.Tensor | None]
    inputs: Any
    random_state: list[torch.Tensor]
    aliases: list[int | None]
    backward: bool

    def difference(self, expected: Observed, strictness: Strictness) -> str | None:
        """Where this differs from what eager did."""
        for name in ("outputs", "gradients", "inputs", "random_state"):
            mine, its = getattr(self, name), getattr(expected, name)
            found = compare.difference(mine, its, name, strictness)
            if found is not None:
                return found
        if self.aliases != expected.aliases:
            return f"outputs share memory with inputs {self.aliases}, eager {expected.aliases}"
        return None


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a trial: the outcome, the reason or id or difference, and how values were compared."""

    outcome: Outcome
    detail: str = ""
    notes: Sequence[str] = ()


def random_state(device: str) -> list[torch.Tensor]:
    """States of the default generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def _aliases(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[int | None]:
    """For each output tensor, the first input whose memory it is in."""

    def address(value: Any) -> int:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return 0
        return value.untyped_storage().data_ptr()

    places = [address(value) for value in inputs]
    return [
        places.index(address(value)) if address(value) and address(value) in places else None
        for value in outputs
        if isinstance(value, torch.Tensor)
    ]


def run(function: Callable[..., Any], call: Call, device: str, *, backward: bool = True) -> Observed:
    """One call on a copy of its arguments, with its backward."""
    args, kwargs = compare.copy_of((call.args, call.kwargs))
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    torch.manual_seed(call.seed)
    outputs = function(*args, **kwargs)
    start = [t for t in pytree.tree_leaves(call.differentiable(outputs)) if isinstance(t, torch.Tensor)]
    start = [t for t in start if t.requires_grad]
    backward = backward and bool(start)
    if backward:
        torch.autograd.backward(start, [_cotangent(t, call.seed + i) for i, t in enumerate(start)])
    return Observed(
        outputs=outputs,
        gradients=[t.grad for t in tensors if t.requires_grad and t.is_leaf],
        inputs=tensors,
        random_state=random_state(device),
        aliases=_aliases(pytree.tree_leaves(outputs), tensors),
        backward=backward,
    )


def _cotangent(output: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex64 if output.is_complex() else torch.float32
    return torch.randn(output.shape, generator=generator, dtype=dtype).to(output.device, output.dtype)


def compare_with_eager(
    function: Callable[..., Any],
    calls: Sequence[Call],
    entry: Entry,
    device: str,
    *,
    values: bool = True,
    report: Report = lambda _: None,
) -> Result:
    """Graph a function for the first call's arguments, make all calls, and compare each with eager.

    What the first call gave is compared again after each other one: nothing that somebody holds may be overwritten.

    Args:
        function: takes the calls' arguments.
        calls: the first is the sample.
        entry: how to graph.
        device: where the tensors are.
        values: whether results have values at all (``torch.empty`` has none).
        report: told where the trial stands.
    """
    report("eager")
    try:
        expected = [run(function, call, device) for call in calls]
    except Exception as error:  # eager's own: tried without the backward
        try:
            expected = [run(function, call, device, backward=False) for call in calls]
        except Exception:  # eager's own again: nothing to compare with
            return Result(Outcome.SKIPPED, describe(error))
    notes = [] if any(e.backward for e in expected) else ["no backward"]
    again = [run(function, call, device, backward=e.backward) for call, e in zip(calls, expected, strict=True)]
    strictness, said = repeatability(again, expected, Strictness.BITS if values else Strictness.SHAPES)
    notes += said

    report("graphed")
    collect()  # also, so that nothing dies between the two counts below
    torch._dynamo.utils.counters.clear()
    before = fxgraph.stats()
    found: list[Observed] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sample = compare.copy_of((calls[0].args, calls[0].kwargs))
            graphed = entry(function, *sample)
            for number, (call, its) in enumerate(zip(calls, expected, strict=True), 1):
                found.append(run(graphed, call, device, backward=its.backward))
                for where, mine, reference in (
                    (f"call {number}", found[-1], its),
                    (f"call 1, looked at after call {number}", found[0], expected[0]),
                ):
                    gap = mine.difference(reference, strictness)
                    if gap is None:
                        continue
                    if strictness is Strictness.BITS and mine.difference(reference, Strictness.EQUAL) is None:
                        strictness = Strictness.EQUAL
                        notes.append("zeros differ in sign")
                        continue
                    # Eager's atomics may come in the same order twice, and in another one later.
                    again = [run(function, call, device, backward=its.backward) for _ in range(MORE_RUNS)]
                    looser, said = repeatability(again, [its] * MORE_RUNS, strictness)
                    if looser is strictness or mine.difference(reference, looser) is not None:
                        return Result(Outcome.WRONG, f"{where}: {gap}", notes)
                    strictness = looser
                    notes += said
        except Exception as error:  # whatever the entry raises is the outcome: a refusal or a crash
            refused = refusal(error)
            if refused is not None:
                return Result(Outcome.REFUSED, f"[{refused.id}] {refused.title}: {refused.observed}"[:300], notes)
            return Result(Outcome.CRASH, describe(error), notes)
    after = fxgraph.stats()
    reasons = stated_reasons(before, after, caught)
    replays = after.replays - before.replays
    if reasons:
        return Result(Outcome.EAGER, "; ".join(reasons), notes)
    if replays >= len(calls):
        return Result(Outcome.EQUAL, "", notes)
    return Result(Outcome.UNSTATED, f"{replays} replays for {len(calls)} calls, and no reason", notes)


def repeatability(
    again: Sequence[Observed], expected: Sequence[Observed], wanted: Strictness
) -> tuple[Strictness, list[str]]:
    """How strictly results can be compared where eager, run again, gives these; and what is to be said about it."""
    for strictness, note in (
        (wanted, ""),
        (Strictness.CLOSE, f"eager is not repeatable: {compare.TOLERANCE}"),
    ):
        if all(a.difference(e, strictness) is None for a, e in zip(again, expected, strict=True)):
            return strictness, [note] if note else []
    return Strictness.SHAPES, ["eager is not repeatable even within that tolerance: values are not compared"]


def stated_reasons(before: fxgraph.Stats, after: fxgraph.Stats, caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Why something ran eagerly: counted by fxgraph, said in a warning, or Dynamo's reason for breaking a graph."""
    counted = [r for r, n in after.eager_reasons.items() if n != before.eager_reasons.get(r)]
    warned = [str(w.message) for w in caught if issubclass(w.category, fxgraph.EagerFallbackWarning)]
    warned = [text for text in warned if not any(reason in text for reason in counted)]
    broken = [
        f"Dynamo {what}: {_first_line(text)}"
        for counter, what in (("graph_break", "broke the graph"), ("unimplemented", "skipped the function"))
        for text in torch._dynamo.utils.counters[counter]
    ]
    return [_first_line(text) for text in dict.fromkeys([*counted, *warned, *broken])]


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def collect() -> None:
    """Forget what Dynamo compiled and free what only cycles keep, so that one trial does not weigh on the next."""
    torch._dynamo.reset()
    gc.collect()
