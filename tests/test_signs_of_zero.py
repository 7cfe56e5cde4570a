"""``-0.0 == 0.0``, and Dynamo's guards compare by ``==``; a replay must give eager's sign all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxgraph

GLOBAL = 0.0


def times(factor: float) -> Callable[..., torch.Tensor]:
    return lambda x, default=0.0: torch.stack([x * factor, x * default])


class Reads(nn.Module):
    """Outputs whose signs are those of constants that are found in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute, self.pair, self.table, self.number = 0.0, (0.0, 1.0), {"key": 0.0}, complex(0.0, 0.0)
        self.inner, self.function = nn.LeakyReLU(0.0), times(0.0)

    def forward(self, x: torch.Tensor, plain: float, pair: Any = (0.0, 1), *, named: float = 0.0) -> Any:
        floats = [self.attribute, self.pair[0], self.table["key"], plain, pair[0], named, GLOBAL]
        number = torch.view_as_real(torch.full(x.shape, self.number, device=x.device))
        return [*[x * factor for factor in floats], self.inner(-x), self.function(x), number]


def change_cell(module: Reads) -> None:
    module.function.__closure__[0].cell_contents = -0.0  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Reads, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda m, _: setattr(m, "attribute", -0.0),
    "tuple": lambda m, _: setattr(m, "pair", (-0.0, 1.0)),
    "dictionary": lambda m, _: m.table.update(key=-0.0),
    "inner module": lambda m, _: setattr(m.inner, "negative_slope", -0.0),
    "another closure": lambda m, _: setattr(m, "function", times(-0.0)),
    "closure": lambda m, _: change_cell(m),
    "default": lambda m, _: setattr(m.function, "__defaults__", (-0.0,)),
    "complex": lambda m, _: setattr(m, "number", complex(0.0, -0.0)),
    "global": lambda m, patch: patch.setitem(globals(), "GLOBAL", -0.0),
}
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "positional": ((-0.0,), {}),
    "in a tuple": ((0.0, (-0.0, 1)), {}),
    "named": ((0.0,), {"named": -0.0}),
}


def graphed_by(entry: str, module: nn.Module, *sample: Any) -> Any:
    if entry == "compile":
        torch._dynamo.reset()
        return torch.compile(module, backend="graphed")
    return fxgraph.make_graphed_callables(module, sample)


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.signbit(), other.signbit()), f"output {k}"


@pytest.mark.parametrize("entry", ["make_graphed_callables", "compile"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_sign_of_a_zero_that_is_read(change: str, entry: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, module, x = Reads(), Reads(), torch.ones(3, device=device)
    graphed = graphed_by(entry, module, x, 0.0)
    before = eager(x, 0.0)
    assert_same_bits(graphed(x, 0.0), before)
    for changed in (eager, module):
        CHANGES[change](changed, monkeypatch)
    expected = eager(x, 0.0)
    assert any(not torch.equal(a.signbit(), b.signbit()) for a, b in zip(expected, before, strict=True))
    assert_same_bits(graphed(x, 0.0), expected)


@pytest.mark.parametrize("entry", ["make_graphed_callables", "compile"])
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_the_sign_of_a_zero_that_is_given(argument: str, entry: str, device: str) -> None:
    eager, x, (args, kwargs) = Reads(), torch.ones(3, device=device), ARGUMENTS[argument]
    graphed = graphed_by(entry, Reads(), x, 0.0)
    for _ in range(2):
        assert_same_bits(graphed(x, 0.0), eager(x, 0.0))
        assert_same_bits(graphed(x, *args, **kwargs), eager(x, *args, **kwargs))


def test_two_zeros_are_two_captures_and_what_stands_against_one_is_said(device: str) -> None:
    x = torch.ones(3, device=device)

    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    graphed = fxgraph.make_graphed_callables(function, (x, 0.0))
    for _ in range(2):
        for factor in (0.0, -0.0):
            graphed(x, factor)
    assert len(fxgraph.stats(graphed).captures) == 2
    strict = fxgraph.make_graphed_callables(function, (x, -0.0), options={"on_new_signature": "error"})
    with pytest.raises(fxgraph.SignatureError, match=r"signs of the zeros in L\['factor'\]"):
        strict(x, 0.0)


def test_not_a_number_is_one_signature(device: str) -> None:
    """A float that Dynamo leaves symbolic, as it does behind torch.compile from its second value on."""
    torch._dynamo.reset()
    x = torch.ones(3, device=device)
    compiled = torch.compile(lambda x, factor: x * factor, backend="graphed")
    compiled(x, 1.0)
    compiled(x, 2.0)
    before = len(fxgraph.stats().captures)
    for _ in range(3):
        assert compiled(x, float("nan")).isnan().all()
    assert len(fxgraph.stats().captures) == before + 1
