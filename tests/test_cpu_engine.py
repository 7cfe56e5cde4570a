"""What the CPU engine does beyond the contract of all engines: who runs an op, and where values lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxgraph._torch_compat import interpreter
from fxgraph.engines import CapturedRegion, get

aten = torch.ops.aten
SIZE = 1 << 10


def capture(region: Callable[..., Any], *inputs: torch.Tensor) -> CapturedRegion:
    engine = get("cpu")
    return engine.capture(engine.new_pool(torch.device("cpu")), region, list(inputs), 1)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# -- who runs an op ---------------------------------------------------------------------------------------------------


def _mixed(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Well-known ops around one that takes indices; more than the interpreter's least number on both sides."""
    a = x.exp().mul(0.5).add(1.0).relu().sigmoid()
    rows = torch.nn.functional.embedding(i, a)
    return rows.exp().mul(0.5).add(1.0).relu().sigmoid(), torch.nn.functional.dropout(rows, 0.5)


@pytest.mark.parametrize("available", [True, False], ids=["interpreter", "without the interpreter"])
def test_both_ways_to_run_an_op_give_the_same(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    together = interpreter.interpreted

    def counted(calls: Any) -> Callable[[], None]:
        runs.append(len(calls))
        return together(calls)

    monkeypatch.setattr(interpreter, "interpreted", counted)
    monkeypatch.setattr(interpreter, "_AVAILABLE", available)
    x, i = torch.randn(5, 3), torch.tensor([0, 4])
    captured = capture(_mixed, x, i)
    assert len(runs) == (2 if available else 0)
    for seed in (1, 2):
        x.normal_()
        torch.manual_seed(seed)
        expected = _mixed(x, i)
        torch.manual_seed(seed)
        captured.replay()
        same(captured.outputs, expected)


def test_an_index_out_of_range_is_an_index_error_in_a_replay() -> None:
    x, i = torch.randn(5, 3), torch.tensor([0, 4])
    captured = capture(_mixed, x, i)
    i.fill_(5)
    with pytest.raises(IndexError) as eager:
        _mixed(x, i)
    with pytest.raises(IndexError) as found:
        captured.replay()
    assert str(found.value) == str(eager.value)
    i.fill_(1)
    captured.replay()  # and the region still works


def test_a_division_by_zero_says_what_it_says_in_eager() -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.div(x + 1, y, rounding_mode="floor").mul(2).neg(),)

    x, y = torch.tensor([7]), torch.tensor([1])
    captured = capture(region, x, y)
    y.zero_()
    with pytest.raises(RuntimeError) as eager:
        region(x, y)
    with pytest.raises(RuntimeError) as found:
        captured.replay()
    assert str(found.value) == str(eager.value)


def test_an_op_that_writes_an_input_and_gives_new_memory_does_both_in_a_replay() -> None:
    def region(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten._native_batch_norm_legit.default(x, None, None, mean, var, True, 0.1, 1e-5)

    x, mean, var = torch.randn(6, 3), torch.zeros(3), torch.ones(3)
    captured = capture(region, x, mean, var)
    x.normal_()
    mean.zero_()
    var.fill_(1)
    expected_mean, expected_var = mean.clone(), var.clone()
    expected = region(x, expected_mean, expected_var)
    captured.replay()
    same(captured.outputs, expected)
    same((mean, var), (expected_mean, expected_var))


def test_a_capture_meets_no_value_that_the_region_does_not_give() -> None:
    """An op that is strict about its values reads what an op that Python calls has written just before."""

    def region(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.exp().neg().exp().neg().exp()
        chance = aten.embedding.default(x, i)  # between 0 and 1
        return (aten.mul.Tensor(aten.bernoulli.default(aten.sqrt.default(chance)), 2.0).neg().exp(),)

    for _ in range(5):
        noise = [torch.full((3, SIZE), -7.0) for _ in range(8)]  # what freed memory holds
        del noise
        capture(region, torch.rand(3, SIZE), torch.arange(3)).replay()


# -- where values lie -------------------------------------------------------------------------------------------------


def test_values_that_are_needed_for_a_while_share_memory() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(50):
            x = x.sin().view(2, -1).t().contiguous().view(-1)
        return (x,)

    engine = get("cpu")
    pool = engine.new_pool(torch.device("cpu"))
    x = torch.randn(SIZE)
    captured = engine.capture(pool, chain, [x], 0)
    # At any time one value is read and one is written, and the last one is the output.
    assert pool.bytes_held() <= 3 * SIZE * x.element_size()
    x.normal_()
    captured.replay()
    same(captured.outputs, chain(x))


def test_a_conjugate_view_of_a_value_that_is_needed_for_a_while() -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(4):
            x = (x * 2).conj() + (x * 3).imag
        return (x.resolve_conj(),)

    x = torch.randn(5, dtype=torch.complex64)
    captured = capture(region, x)
    x.normal_()
    captured.replay()
    same(captured.outputs, region(x))


# A step takes two earlier values, by their distance from the end.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": aten.add.Tensor,
    "exp": lambda a, b: aten.tanh.default(a),
    "number": lambda a, b: aten.mul.Tensor(a, 0.5),
    "view": lambda a, b: aten.t.default(a),
    "part": lambda a, b: aten.cat.default([aten.slice.Tensor(a, 0, 0, 2), aten.slice.Tensor(b, 0, 2, 4)], 0),
    "matrix": aten.mm.default,
    "draw": lambda a, b: aten.mul.Tensor(a, aten.bernoulli.p(b, 0.5)),
    "in place": lambda a, b: aten.add_.Tensor(aten.mul.Tensor(a, 1.5), b),
    "empty": lambda a, b: aten.copy_.default(aten.empty_like.default(a), b),
    "index": lambda a, b: aten.index_select.default(a, 0, torch.arange(3, -1, -1)),
    "two": lambda a, b: aten.add.Tensor(*aten.max.dim(a, 0)[:1], b),
    "norm": lambda a, b: aten.native_layer_norm.default(a, [4], None, None, 1e-5)[0],
    "fresh": lambda a, b: aten.zeros_like.default(a),
}


@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 6), st.integers(1, 6)), max_size=30),
    given_back=st.sets(st.integers(1, 30), max_size=4),
)
def test_a_replay_equals_the_function_wherever_its_values_lie(
    steps: list[tuple[str, int, int]], given_back: set[int]
) -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for name, a, b in steps:
            values.append(STEPS[name](values[-min(a, len(values))], values[-min(b, len(values))]))
        return (values[-1], *(values[-k] for k in sorted(given_back) if k <= len(values)))

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    captured = capture(region, x, y)
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.normal_()
        y.normal_()
        state = torch.get_rng_state()
        expected = region(x, y)
        torch.set_rng_state(state)
        captured.replay()
        same(captured.outputs, expected)
        assert torch.equal(torch.get_rng_state(), state) or "draw" in {name for name, _, _ in steps}
