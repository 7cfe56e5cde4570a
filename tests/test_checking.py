"""fxgraph.check: all that stands against a capture, also where the callable's Python does not fit into one graph."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxgraph

# line of Python -> the rule that it breaks
LINES = {
    "x = x + 1": None,
    "x = torch.sin(x)": None,
    "x = x * x.sum().item()": "host-sync",
    "x = x + x.nonzero().sum()": "data-dependent-shape",
    "print('here')": "untraceable",
    "warnings.warn('here')": "untraceable",
    "if x.sum() > 0: x = x + 2": "host-sync",
}
WRITES = ("print('here')", "warnings.warn('here')")
ENDS = "if x.sum() > 0: x = x + 2"


def function_of(lines: list[str]) -> Any:
    source = "\n".join(
        ["import torch, warnings", "def function(x):", *(f"    {line}" for line in lines), "    return x"]
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, "<generated>", "exec"), namespace)
    return namespace["function"]


@given(lines=st.lists(st.sampled_from(sorted(LINES)), max_size=7))
def test_every_line_up_to_a_branch_on_data_is_judged(lines: list[str]) -> None:
    expected: collections.Counter[tuple[str, int]] = collections.Counter()
    for number, line in enumerate(lines, start=3):
        rule = LINES[line]
        # What writes is passed over from the first such line on.
        if rule is not None and not (line in WRITES and any(one in WRITES for one in lines[: number - 3])):
            expected[rule, number] += 1
        if line == ENDS:
            break
    report = fxgraph.check(function_of(lines), (torch.ones(2, 3),))
    assert collections.Counter((one.id, one.where.line) for one in report.violations) == expected


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(3, 3), torch.ones(3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * self.scale
        self.calls += 1
        y = x[x > 0]
        print("not in a check")  # noqa: T201
        return x + torch.unique(y).sum()


def test_a_check_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    module = Printing()
    report = fxgraph.check(module, (torch.ones(2, 3),))
    assert [one.id for one in report.violations] == ["data-dependent-shape", "untraceable", "data-dependent-shape"]
    assert module.calls == 0
    assert capsys.readouterr().out == ""
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in (*module.parameters(), module.scale))


def test_the_hint_on_what_cannot_be_read_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        if x.sum() > 0:
            x = x.cos()
        print("there")  # noqa: T201
        return x + 1

    x = torch.ones(2)
    (violation,) = fxgraph.check(function, (x,)).violations
    assert "torch._dynamo.explain(callable)(*args)" in violation.hint
    assert torch._dynamo.explain(function)(x).graph_break_count == 2
