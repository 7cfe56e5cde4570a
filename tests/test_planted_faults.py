"""The state machine must be able to fail: each fault that is planted here into fxgraph is found by it.

A fault is a patch that breaks one of the invariants. The machine runs with fixed seeds until it sees a difference, for
a bounded number of steps; without a fault the same seeds show none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Difference
from test_stateful import Machine

from fxgraph import graphed, plan, program, replay, slots
from fxgraph._torch_compat.autograd import preserve_versions
from fxgraph.engines import Engine

Patch = pytest.MonkeyPatch
MOST_STEPS = 1500


def slot_freed_too_early(patch: Patch) -> None:
    """A forward that waits for its backward does not keep its slot."""
    patch.setattr(slots.Slot, "free", lambda self: not self._held.any())


def slot_never_given_back(patch: Patch) -> None:
    """A slot waits for ever."""
    patch.setattr(slots.Lease, "end", lambda self: None)


def held_outputs_not_watched(patch: Patch) -> None:
    patch.setattr(slots.Slot, "free", lambda self: not self.pending)


def held_gradients_not_watched(patch: Patch) -> None:
    patch.setattr(slots.Slot, "gradients_free", lambda self: True)


def addresses_missing_from_the_key(patch: Patch) -> None:
    key_of = program.key_of

    def without(specs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        head, parts = key_of(specs, inputs)[:2], key_of(specs, inputs)[2:]
        return (*head, *(part[1:] if spec.live else part for spec, part in zip(specs, parts, strict=True)))

    patch.setattr(program, "key_of", without)


def random_state_not_put_back_after_capture(patch: Patch) -> None:
    @contextlib.contextmanager
    def unchanged(self: Engine, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        kept = [tensor.clone() for tensor in tensors]
        with torch.no_grad(), preserve_versions(tensors):
            yield
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)

    patch.setattr(Engine, "unchanged", unchanged)


def buffers_not_put_back_after_warm_up(patch: Patch) -> None:
    original = Engine.unchanged
    patch.setattr(Engine, "unchanged", lambda self, tensors: original(self, []))


def versions_not_checked(patch: Patch) -> None:
    patch.setattr(replay.Call, "check_versions", lambda self: None)


def zeros_in_place_of_no_gradient(patch: Patch) -> None:
    partial = replay._partial_backward

    def zeros(call: replay.Call, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        inputs = [call.slot._arguments[i] for i in call.capture.plan.gradient_of]
        found = partial(call, tangents)
        return tuple(torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True))

    patch.setattr(replay, "_partial_backward", zeros)


def inputs_not_copied(patch: Patch) -> None:
    """A static input keeps what it held at capture."""
    fill = slots.Slot.fill
    patch.setattr(slots.Slot, "fill", lambda self, inputs: None if hasattr(self, "forward") else fill(self, inputs))


def backward_draws_again(patch: Patch) -> None:
    patch.setattr(plan, "_drop_forward_draws", lambda backward, drawn: None)


def guards_off(patch: Patch) -> None:
    """Any trace fits any call (of the same grad mode and shapes, else most calls would raise at once)."""
    made = graphed._Traced.__init__

    def init(self: Any, *args: Any) -> None:
        made(self, *args)
        self.check = lambda names: True

    patch.setattr(graphed._Traced, "__init__", init)


def retained_graph_freed(patch: Patch) -> None:
    patch.setattr(replay, "keep_graph", lambda: False)


def nothing(patch: Patch) -> None:
    """No fault."""


# With the seed that finds it soonest.
FAULTS: list[tuple[Callable[[Patch], None], int]] = [
    (slot_freed_too_early, 0),
    (slot_never_given_back, 0),
    (held_outputs_not_watched, 0),
    (held_gradients_not_watched, 0),
    (addresses_missing_from_the_key, 0),
    (random_state_not_put_back_after_capture, 0),
    (buffers_not_put_back_after_warm_up, 0),
    (versions_not_checked, 0),
    (zeros_in_place_of_no_gradient, 0),
    (inputs_not_copied, 0),
    (backward_draws_again, 0),
    (guards_off, 0),
    (retained_graph_freed, 0),
]


def look_for_a_difference(device: str, most_steps: int, first_seed: int = 0) -> tuple[Difference | None, int]:
    """Run the machine until it finds something; also how many steps that took."""

    class Looking(Machine):
        pass

    Looking.device = device
    found = None
    batch = settings(
        max_examples=6,
        stateful_step_count=25,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    number = first_seed
    while found is None and Looking.steps < most_steps:
        seed(number)(Looking)
        try:
            run_state_machine_as_test(Looking, settings=batch)
        except Exception as error:  # Hypothesis wraps what does not come up in the same way when it runs once more
            found = Looking.difference
            if found is None:
                raise error
        number += 1
    return found, Looking.steps


@pytest.mark.parametrize(("fault", "first_seed"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_found(
    fault: Callable[[Patch], None],
    first_seed: int,
    device: str,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "torch")
    fault(monkeypatch)
    found, steps = look_for_a_difference(device, MOST_STEPS, first_seed)
    assert found is not None, f"not found in {steps} steps"
    assert "replay(Blueprint(" in str(found)


def test_nothing_is_found_without_a_fault(device: str) -> None:
    found, _ = look_for_a_difference(device, 150)
    assert found is None, str(found)
