"""A state machine: random modules, random courses of steps, and after each step no difference from the eager twin.

``make soak`` runs it for as long as asked (``soak.py``); ``test_planted_faults.py`` shows that it finds faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from machine import Difference, Twins, strict_warnings
from strategies import STEPS, Blueprint, Setup, blueprints, setups

NEED_A_CALL = {
    "backward", "backward_of_two", "gradients", "second_order", "drop", "keep", "in_place", "hook_output",
}  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Draws a module and steps; carries them out on a graphed module and its eager twin."""

    device: ClassVar[str] = "cpu"
    steps: ClassVar[int] = 0
    sequences: ClassVar[int] = 0
    failed: ClassVar[Twins | None] = None
    difference: ClassVar[Difference | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.twins: Twins | None = None
        self._warnings = strict_warnings()
        self._warnings.__enter__()

    @initialize(blueprint=blueprints, setup=setups)
    def graph(self, blueprint: Blueprint, setup: Setup) -> None:
        with self._noticed(None):
            self.twins = Twins(blueprint, setup, self.device)
        type(self).sequences += 1

    def take(self, *step: Any) -> None:
        assert self.twins is not None
        taken = self.twins.taken
        with self._noticed(self.twins):
            self.twins.take(*step)
        type(self).steps += self.twins.taken - taken

    def teardown(self) -> None:
        twins, self.twins = self.twins, None
        try:
            if twins is not None and type(self).failed is not twins:
                with self._noticed(twins):
                    twins.finish()
        finally:
            self._warnings.__exit__(None, None, None)

    @contextlib.contextmanager
    def _noticed(self, twins: Twins | None) -> Iterator[None]:
        """Remember the first difference: Hypothesis runs a failing example once more before it reports it."""
        try:
            yield
        except Difference as difference:
            if type(self).difference is None:
                type(self).difference = difference
            type(self).failed = twins
            raise


def _rule_for(name: str, arguments: Any, i: int) -> Any:
    def take(self: Machine, arguments: tuple[Any, ...]) -> None:
        self.take(name, *arguments)

    take.__name__ = take.__qualname__ = f"{name}_{i}" if i else name
    made = rule(arguments=arguments)(take)
    if name in NEED_A_CALL:
        made = precondition(lambda self: self.twins is not None and bool(self.twins.eager.calls))(made)
    return made


for _name, (_weight, _arguments) in STEPS.items():
    for _i in range(_weight):
        setattr(Machine, f"{_name}_{_i}", _rule_for(_name, _arguments, _i))


def test_no_course_of_steps_differs_from_eager(device: str) -> None:
    class OnDevice(Machine):
        pass

    OnDevice.device = device
    # Shortening takes minutes; the course that is printed is a program, and soak.shorten() shortens it.
    modest = settings(max_examples=12, stateful_step_count=30, phases=[Phase.generate], report_multiple_bugs=False)
    with torch.backends.cudnn.flags(deterministic=True):  # else eager itself differs from run to run
        run_state_machine_as_test(OnDevice, settings=modest)
    assert OnDevice.steps > 300
