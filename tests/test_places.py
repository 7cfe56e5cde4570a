"""Large inputs are read where they lie, once a loop has shown that they lie in few places. Note [Large inputs]."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxgraph
from fxgraph import places
from fxgraph.slots import Capture

SIZE = (512, 64)  # 128 KiB


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "LEAST_BYTES", 1 << 16)


class Means(nn.Module):
    """Saves its input for the gradient of the scale, and something as large."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIZE[1]))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale * factor).mean(0)


class Pair:
    """The module graphed, and its eager twin."""

    def __init__(self, device: str, module: nn.Module | None = None, grad: bool = False, **options: Any) -> None:
        eager = (module or Means()).to(device)
        self.device, self.eager = device, eager
        self.factor = torch.randn(SIZE[1], device=device)
        x = torch.randn(SIZE, device=device, requires_grad=grad)
        self.graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x, self.factor), options=options)

    def step(self, x: torch.Tensor) -> None:
        """A step of both, compared bit by bit."""
        seen = []
        for module in (self.eager, self.graphed):
            out = module(x, self.factor)
            out.square().sum().backward()
            seen.append([out.detach(), *[p.grad for p in module.parameters()], x.grad])
            module.zero_grad()
            x.grad = None
        torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)

    @property
    def capture(self) -> Capture:
        (found,) = [c for program in self.graphed.forward.programs() for c in program.captures.values()]
        return found

    @property
    def slots(self) -> set[tuple[int, ...] | None]:
        return {slot.where for slot in self.capture.slots}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by the number of bytes that each call copies in."""
    made: list[int] = []
    fill = fxgraph.slots.Slot.fill

    def counted(slot: Any, inputs: Any) -> None:
        made.append(sum(slot.statics[i].nbytes for i in slot._copied))
        fill(slot, inputs)

    monkeypatch.setattr(fxgraph.slots.Slot, "fill", counted)
    yield made


@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
@pytest.mark.parametrize("count", [1, 2])
def test_inputs_in_few_places_are_not_copied_any_more(count: int, grads: str, device: str, copies: list[int]) -> None:
    pair = Pair(device, grads=grads)
    batches = [torch.randn(SIZE, device=device) for _ in range(count)]
    for step in range(places.CALLS + 2 * count):
        with torch.no_grad():
            batches[step % count].uniform_(-1, 1)  # other values in the same place
        pair.step(batches[step % count])
    assert pair.slots == {(x.data_ptr(),) for x in batches}, "and the slot that copies is gone"
    copies.clear()
    for step in range(2 * count):
        pair.step(batches[step % count])
    assert copies == [pair.factor.nbytes] * 2 * count
    assert f"large inputs read in {count} place(s)" in str(pair.capture)


def test_an_input_elsewhere_is_copied_again(device: str) -> None:
    pair = Pair(device)
    x = torch.randn(SIZE, device=device)
    for _ in range(places.CALLS + 1):
        pair.step(x)
    assert pair.slots == {(x.data_ptr(),)}
    others = [torch.randn(SIZE, device=device) for _ in range(3)]
    for other in (*others, x, *others):
        pair.step(other)
    assert pair.slots == {None}


def test_places_that_change_again_and_again_are_given_up(device: str) -> None:
    pair = Pair(device)
    kept = []
    for _ in range(places.TRIES + 2):
        kept.append(torch.randn(SIZE, device=device))
        for _ in range(places.CALLS + 1):
            pair.step(kept[-1])
    assert pair.slots == {None}
    captures = len(pair.capture.slots)
    pair.step(kept[0])
    assert len(pair.capture.slots) == captures


def test_many_places_are_copied_from(device: str) -> None:
    pair = Pair(device)
    batches = [torch.randn(SIZE, device=device) for _ in range(places.MOST_PLACES + 1)]
    for step in range(4 * places.CALLS):
        pair.step(batches[step % len(batches)])
    assert pair.slots == {None}


def test_only_as_many_places_as_the_copy_pays_for(device: str) -> None:
    """A slot that keeps ten times its input's memory is not made twice, for one copy less."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(SIZE[1], SIZE[1]) for _ in range(10)])

        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            x = x * factor
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    pair = Pair(device, Wide())
    batches = [torch.randn(SIZE, device=device) for _ in range(2)]
    for step in range(2 * places.CALLS):
        pair.step(batches[step % 2])
    assert pair.slots == {None}
    for _ in range(2 * places.CALLS):
        pair.step(batches[0])
    assert pair.slots == {(batches[0].data_ptr(),)}, "one place costs less than the copy"


def settled(pair: Pair, x: torch.Tensor) -> None:
    for _ in range(places.CALLS + 1):
        pair.step(x)
    assert pair.slots == {(x.data_ptr(),)}


def test_an_input_that_the_user_drops_before_the_backward(device: str) -> None:
    pair = Pair(device)
    values = torch.randn(SIZE, device=device)
    x = values.clone()
    settled(pair, x)
    expected = torch.autograd.grad(pair.eager(values, pair.factor).sum(), pair.eager.scale)[0]
    out = pair.graphed(x, pair.factor).sum()
    del x
    gc.collect()
    others = [torch.full(SIZE, float("nan"), device=device) for _ in range(4)]  # would take the memory
    assert torch.equal(torch.autograd.grad(out, pair.graphed.scale)[0], expected)
    del others


def test_an_input_that_is_changed_in_place_before_the_backward(device: str) -> None:
    pair = Pair(device)
    x = torch.randn(SIZE, device=device)
    settled(pair, x)
    for module in (pair.eager, pair.graphed):
        loss = module(x, pair.factor).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    pair.step(x)


def test_an_input_that_no_gradient_needs_may_change(device: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(SIZE[1]))

        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return (x + self.shift).exp().mean(0) * factor

    pair = Pair(device, Sum())
    x = torch.randn(SIZE, device=device)
    settled(pair, x)
    gradients = []
    for module in (pair.eager, pair.graphed):
        loss = module(x, pair.factor).sum()
        x.zero_()
        gradients.append(torch.autograd.grad(loss, module.shift)[0])
        x.copy_(torch.arange(x.numel(), device=device).view_as(x) % 7)
        module(x, pair.factor)
    pair.step(x)


def test_two_forwards_on_one_input(device: str) -> None:
    pair = Pair(device)
    x = torch.randn(SIZE, device=device)
    settled(pair, x)
    for _ in range(2):
        gradients = []
        for module in (pair.eager, pair.graphed):
            first, second = module(x, pair.factor), module(x, pair.factor)
            gradients.append(torch.autograd.grad((first * second).sum(), module.scale)[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert pair.slots == {(x.data_ptr(),)}
    assert fxgraph.stats(pair.graphed).eager_calls == 0


def test_more_forwards_in_flight_than_places(device: str) -> None:
    pair = Pair(device, max_in_flight=2)
    batches = [torch.randn(SIZE, device=device) for _ in range(2)]
    for step in range(places.CALLS + 2):
        pair.step(batches[step % 2])
    assert None not in pair.slots
    new = [torch.randn(SIZE, device=device) for _ in range(2)]
    sums = []
    for module in (pair.eager, pair.graphed):
        losses = [module(x, pair.factor).sum() for x in new]
        sums.append([torch.autograd.grad(loss, module.scale)[0] for loss in losses])
    torch.testing.assert_close(sums[1], sums[0], rtol=0, atol=0)
    assert fxgraph.stats(pair.graphed).eager_calls == 0
    assert pair.slots == {None}


def test_outputs_and_gradients_that_are_kept(device: str) -> None:
    pair = Pair(device, grad=True)
    x = torch.randn(SIZE, device=device, requires_grad=True)
    settled(pair, x)
    kept: list[list[torch.Tensor]] = [[], []]
    for _ in range(4):
        with torch.no_grad():
            x.uniform_(-1, 1)
        for seen, module in zip(kept, (pair.eager, pair.graphed), strict=True):
            out = module(x, pair.factor)
            seen += [out, *torch.autograd.grad(out.square().sum(), [x, module.scale])]
    torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x,
        lambda x: x[1:-1],  # another place in the same memory
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
    ],
    ids=["whole", "slice", "transposed", "gaps"],
)
def test_layouts(kind: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    pair = Pair(device)
    x = kind(torch.randn(SIZE, device=device))
    for _ in range(places.CALLS + 3):
        with torch.no_grad():
            x.uniform_(-1, 1)
        pair.step(x)
    used = [c for program in pair.graphed.forward.programs() for c in program.captures.values() if c.replays]
    assert [{slot.where for slot in capture.slots} for capture in used] == [{(x.data_ptr(),)}]


def test_an_input_that_is_not_aligned_is_copied(device: str) -> None:
    pair = Pair(device)
    x = torch.randn(SIZE[0] * SIZE[1] + 1, device=device)[1:].view(SIZE)
    for _ in range(places.CALLS + 3):
        pair.step(x)
    assert pair.slots == {None}


def test_an_input_that_the_callable_writes_is_copied(device: str) -> None:
    class Writes(Means):
        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return super().forward(x, factor)

    eager = Writes().to(device)
    graphed = fxgraph.make_graphed_callables(
        copy.deepcopy(eager), (torch.randn(SIZE, device=device), torch.ones(SIZE[1], device=device))
    )
    xs = [torch.zeros(SIZE, device=device) for _ in range(2)]
    with torch.no_grad():
        for _ in range(places.CALLS + 2):
            outs = [m(x, torch.ones(SIZE[1], device=device)) for m, x in zip((eager, graphed), xs, strict=True)]
            torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)
    torch.testing.assert_close(xs[1], xs[0], rtol=0, atol=0)


def test_small_inputs_are_copied(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(places, "LEAST_BYTES", 1 << 20)
    pair = Pair(device)
    x = torch.randn(SIZE, device=device)
    for _ in range(places.CALLS + 3):
        pair.step(x)
    assert pair.slots == {None}


def test_no_memory_is_kept_of_what_was_read(device: str) -> None:
    pair = Pair(device)
    x = torch.randn(SIZE, device=device)
    settled(pair, x)
    storage = x.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata)
    assert holders == 2, "the tensor and this variable"
