"""Callables captured in stages: equal to eager, in as few captures as the data flow allows."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxgraph
import passes

EXPECTED = "ignore:.*captured in parts:fxgraph.EagerFallbackWarning"


def mlp(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), *more)


class Around(nn.Module):
    """Two captured parts with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.before, self.after = mlp(nn.BatchNorm1d(8)), mlp(nn.Dropout(0.25), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.between(self.before(x)))


class Side(Around):
    """What is between has no part in the rest, which can move across it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.before(x)
        chosen = self.between(hidden)
        return self.after(hidden), chosen.sum()


def through_a_number(h: torch.Tensor) -> torch.Tensor:
    return h * h.abs().max().item()


def by_mask(h: torch.Tensor) -> torch.Tensor:
    return h[h.sum(1) > h.sum(1).mean()]


def to_a_fixed_size(h: torch.Tensor) -> torch.Tensor:
    rows = (h.sum(1) > 0).nonzero().squeeze(1)
    return h + h[rows].sum(0)


def by_counting(h: torch.Tensor) -> torch.Tensor:
    return h + torch.bincount((h.sum(1) > 0).long(), minlength=2).float().mean()


def above_a_threshold(h: torch.Tensor) -> torch.Tensor:
    values, indices = h.sum(1).topk(3)
    return h + h[indices[values > values.mean()]].sum(0)


def by_branch(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h * 3


def at_the_largest(h: torch.Tensor) -> torch.Tensor:
    return h + h[h.sum(1).argmax()] + h.select(1, h.sum(0).argmin())[:, None]


def by_list(h: torch.Tensor) -> torch.Tensor:
    first, *others = h.sum(1)[:3].tolist()
    return h * first + max(others) + h.mean().tolist()


def at_places_in_a_list(h: torch.Tensor) -> torch.Tensor:
    return h + h[h.sum(1).topk(2).indices.tolist()].sum(0)


def through_numpy(h: torch.Tensor) -> torch.Tensor:
    return h * float(h.detach().cpu().numpy().sum())


def by_root(h: torch.Tensor) -> torch.Tensor:
    return h * math.sqrt(abs(h.sum()))


@torch.library.custom_op("fxgraph_tests::on_the_host", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def on_the_host(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)


@on_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


on_the_host.register_autograd(lambda ctx, grad: grad * 2)


def in_a_checkpoint(h: torch.Tensor) -> torch.Tensor:
    """Where a number is read inside, and dropout has to draw the same again in the backward."""
    return checkpoint(lambda h: F.dropout(h * h.abs().max().item(), 0.5).sin(), h, use_reentrant=False)


def selected_in_a_checkpoint(h: torch.Tensor) -> torch.Tensor:
    return h + checkpoint(lambda h: h[h.sum(1) > h.sum(1).mean()].sin().sum(0), h, use_reentrant=False)


@fxgraph.eager
def marked(h: torch.Tensor) -> torch.Tensor:
    return h.sin()


# name -> (module, captured parts)
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "item": (lambda: Around(through_a_number), 2),
    "fixed size": (lambda: Around(to_a_fixed_size), 2),
    "bincount": (lambda: Around(by_counting), 2),
    "threshold": (lambda: Around(above_a_threshold), 2),
    "branch": (lambda: Around(by_branch), 3),  # and the condition
    "marked": (lambda: Around(marked), 2),
    "place": (lambda: Around(at_the_largest), 2),
    "list": (lambda: Around(by_list), 2),
    "list of places": (lambda: Around(at_places_in_a_list), 2),
    "mask": (lambda: Around(by_mask), 1),  # what comes after it has another size each time
    "checkpoint": (lambda: Around(in_a_checkpoint), 2),
    "mask in a checkpoint": (lambda: Around(selected_in_a_checkpoint), 2),
    "aside": (lambda: Side(by_mask), 1),
}


def train(module: nn.Module, device: str, steps: int) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    seen: list[Any] = []
    for _ in range(steps):
        x = torch.randn(6, 8, device=device, requires_grad=True)
        optimizer.zero_grad()
        out = module(x)
        loss = sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,)))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), x.grad, torch.rand(1, device=device)]
    return [*seen, *[p.detach() for p in module.parameters()], *module.buffers()]


@pytest.mark.filterwarnings(EXPECTED)
# Dynamo, reading the second part, looks at `.grad` of what the first gave.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", MODELS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
def test_models_with_uncapturable_middles_train_as_in_eager(name: str, entry: str, device: str) -> None:
    make, parts = MODELS[name]
    eager = make().to(device)
    graphed = copy.deepcopy(eager)
    if entry == "torch.compile":
        run: Any = torch.compile(graphed, backend="graphed")
        found = train(run, device, 3)
    else:
        sample = torch.randn(6, 8, device=device, requires_grad=True)
        graphed = fxgraph.make_graphed_callables(graphed, (sample,), allow_unused_input=True)
        found = train(graphed, device, 3)
        stats = fxgraph.stats(graphed)
        assert len(stats.captures) == parts, stats
        assert stats.replays == 3 * parts
    torch.testing.assert_close(found, train(eager, device, 3), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("between", [through_numpy, by_root])
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
def test_numbers_that_python_computes_of_data_are_not_captured(
    between: Callable[[torch.Tensor], torch.Tensor], entry: str, device: str
) -> None:
    eager = Around(between).to(device)
    graphed = copy.deepcopy(eager)
    if entry == "torch.compile":
        found = train(torch.compile(graphed, backend="graphed"), device, 6)
    else:
        sample = torch.randn(6, 8, device=device, requires_grad=True)
        graphed = fxgraph.make_graphed_callables(graphed, (sample,))
        found = train(graphed, device, 6)
        stats = fxgraph.stats(graphed)
        # On the CPU what hands the data to numpy is a part too, of views.
        assert [line.rpartition(", ")[2] for line in stats.captures] in (["6 replays"] * 2, ["6 replays"] * 3), stats
    torch.testing.assert_close(found, train(eager, device, 6), rtol=0, atol=0)


def test_what_comes_after_such_a_number_is_captured_once(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin().cos()
        return (x * math.sqrt(abs(x.sum()))).sin().cos()

    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        graphed = fxgraph.make_graphed_callables(function, (torch.randn(3, device=device),))
    for _ in range(6):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), function(x))
    # The first number might have been a setting, and is a constant of a capture; the others are none.
    replays = [line.rpartition(", ")[2] for line in fxgraph.stats(graphed).captures]
    assert sorted(replays) == ["1 replays", "5 replays", "6 replays"]


def test_whole_numbers_of_data_are_not_captured_either(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        count = int((x > 0).sum())
        if count > 300:
            return x
        return ((x * count).sin().cos() + 1).reshape(-1)[: count + 1].exp().sum() + x.cos().exp().sum()

    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        graphed = fxgraph.make_graphed_callables(function, (torch.randn(3, 40, device=device),))
    for _ in range(6):
        x = torch.randn(3, 40, device=device)
        assert torch.equal(graphed(x), function(x))
    assert len(fxgraph.stats(graphed).captures) <= 4
    before = fxgraph.stats(graphed).captures
    x = torch.randn(3, 40, device=device)
    assert torch.equal(graphed(x), function(x))
    assert len(fxgraph.stats(graphed).captures) == len(before)


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
def test_a_part_that_begins_where_data_says(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.sin().cos()
        return h + h.narrow(1, int(h.sum(0).argmin()), 1).exp().sum()

    graphed = fxgraph.make_graphed_callables(function, (torch.randn(4, 5, device=device),))
    for _ in range(3):
        x = torch.randn(4, 5, device=device)
        assert torch.equal(graphed(x), function(x))


# Dynamo, reading what comes after the break, looks at `.grad` of what the first part gave.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_sizes_of_data_are_captured_a_few_times_at_most(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        chosen = x[x > 0]
        if chosen.numel() == 0:
            return x.sum()
        return (chosen * 2).sin().sum() + (x * 3).cos().sum()

    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        graphed = fxgraph.make_graphed_callables(function, (torch.randn(20, 30, device=device, requires_grad=True),))
    counts, replays = [], []
    for _ in range(12):
        x = torch.randn(20, 30, device=device, requires_grad=True)
        found, expected = graphed(x), function(x)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(out, x)[0] for out in (found, expected)))
        counts.append(len(fxgraph.stats(graphed).captures))
        replays.append(fxgraph.stats(graphed).replays)
    assert counts[-1] == counts[5] <= 6  # then what needs no size of data goes on being captured
    assert replays[-1] - replays[-2] == 1


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
def test_floats_that_change_are_not_captured_by_the_backend(device: str) -> None:
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x.sin().cos() * scale).exp().sin()

    graphed = torch.compile(function, backend="graphed")
    counts = []
    for step in range(8):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x, step * 0.25), function(x, step * 0.25))
        counts.append(len(fxgraph.stats().captures))
    assert counts[2:] == [counts[2]] * 6


def test_a_setting_that_does_not_change_is_a_constant_also_behind_a_break(device: str) -> None:
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        x = x.sin().cos()
        print(end="")  # noqa: T201  # breaks the graph
        return (x * scale).sin() * 2

    x = torch.randn(3, device=device)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        graphed = fxgraph.make_graphed_callables(function, (x, 0.5))
    for _ in range(3):
        assert torch.equal(graphed(x, 0.5), function(x, 0.5))
    assert [line.rpartition(", ")[2] for line in fxgraph.stats(graphed).captures] == ["3 replays"] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + float(np.exp(x.detach().cpu().numpy()).sum()),
        lambda x: x + torch.from_numpy(np.cumsum(x.detach().cpu().numpy())).to(x.device),
        lambda x: x + np.random.rand(),
        lambda x: x[:3] + torch.from_numpy(np.random.rand(3)).to(x),
    ],
)
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_numpy_computes_and_draws_itself(function: Callable[[torch.Tensor], Any], entry: str, device: str) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        return function(x.sin()).cos()

    samples = [torch.randn(1000, device=device, generator=torch.Generator(device).manual_seed(k)) for k in range(4)]
    np.random.seed(3)
    expected = [around(x) for x in samples]
    np.random.seed(3)
    if entry == "torch.compile":
        graphed: Any = torch.compile(around, backend="graphed")
    else:
        graphed = fxgraph.make_graphed_callables(around, (samples[0],))
    torch.testing.assert_close([graphed(x) for x in samples], expected, rtol=0, atol=0)


def test_numpy_of_constants_is_a_constant(device: str) -> None:
    graphed = fxgraph.make_graphed_callables(lambda x: x.sin() / np.sqrt(64), (torch.ones(3, device=device),))
    x = torch.randn(3, device=device)
    assert torch.equal(graphed(x), x.sin() / 8)
    assert (len(fxgraph.stats(graphed).captures), fxgraph.stats(graphed).eager_calls) == (1, 0)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8 is now deprecated:UserWarning")
@pytest.mark.filterwarnings(EXPECTED)
def test_bytes_are_a_mask(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.sin().cos()
        return h.exp() + h[(h.sum(1) > h.sum(1).mean()).byte()].sum(0)

    x = torch.randn(4, 3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    for _ in range(2):
        x = torch.randn(4, 3, device=device, requires_grad=True)
        found, expected = graphed(x), function(x)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        assert torch.equal(*gradients)
    (reason,) = fxgraph.stats(graphed).eager_reasons
    assert reason.startswith("[data-dependent-shape]")


def test_a_number_that_is_written_by_a_mask_is_captured(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[y > 0.5] = 0.5
        y[:, y[0] < -1] = -1
        y[1:][y[1:] < 0] = torch.tensor(-0.25)
        return (y * 3).sin()

    graphed = fxgraph.make_graphed_callables(function, (torch.randn(4, 5, device=device, requires_grad=True),))
    for _ in range(3):
        x = torch.randn(4, 5, device=device, requires_grad=True)
        found, expected = graphed(x), function(x)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, expected)))
    assert (len(fxgraph.stats(graphed).captures), fxgraph.stats(graphed).eager_calls) == (1, 0)


@torch.library.custom_op("fxgraph_tests::wrong_fake", mutates_args=())
def wrong_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@wrong_fake.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such shape")


def test_a_call_on_which_only_the_fake_of_an_op_fails_is_counted_and_said_where_it_is(device: str) -> None:
    x = torch.ones(3, device=device)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        graphed = fxgraph.make_graphed_callables(lambda x: wrong_fake(x.sin()).cos(), (x,))
    with pytest.warns(fxgraph.EagerFallbackWarning, match="runs eagerly: .op-failed. RuntimeError.'no such") as caught:
        found = graphed(x)
    assert [one.filename for one in caught] == [__file__]
    assert torch.equal(found, (x.sin() * 2).cos())
    graphed(x)
    (reason,) = fxgraph.stats(graphed).eager_reasons
    assert reason.startswith("[op-failed] RuntimeError('no such shape')")
    assert fxgraph.stats(graphed).eager_calls == 2
    (violation,) = fxgraph.check(lambda x: wrong_fake(x), (x,)).violations
    assert "register_fake" in violation.hint


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "host-sync"),
        (lambda x: x * 2 if torch.equal(x, x.sin()) else x, "host-sync"),
        (lambda x: x * len(list(range(int(x.abs().sum())))), "host-sync"),
        (lambda x: x * [1.0, 2.0][(x.sum() > 0).long()], "host-sync"),
        (lambda x: x * float(x.detach().cpu().numpy().sum()), "host-sync"),
        (lambda x: x * torch.nn.functional.one_hot(x.long()).sum(), "data-dependent-shape"),
        (lambda x: x * (2 if print(end="") is None else 3), "untraceable"),  # noqa: T201  # breaks the graph
    ],
)
def test_where_data_decides_on_what_python_does_the_rule_says_how(function: Callable[..., Any], rule: str) -> None:
    x = torch.ones(3)
    with pytest.raises(fxgraph.UncapturableError) as caught:
        fxgraph.make_graphed_callables(function, (x,), options={"on_uncapturable": "error"})
    assert caught.value.id == rule
    (violation,) = fxgraph.check(function, (x,)).violations
    assert violation.id == rule
    assert violation.where.file == __file__


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
def test_a_custom_op_on_the_host(device: str) -> None:
    eager = Around(lambda h: on_the_host(h)).to(device)  # the op itself cannot be copied
    graphed = copy.deepcopy(eager)
    graphed = fxgraph.make_graphed_callables(graphed, (torch.randn(6, 8, device=device, requires_grad=True),))
    torch.testing.assert_close(train(graphed, device, 3), train(eager, device, 3), rtol=0, atol=0)
    assert len(fxgraph.stats(graphed).captures) == 2


@pytest.mark.parametrize("choice", ["eager", "error"])
def test_other_choices_than_split_leave_it_whole(choice: str, device: str) -> None:
    module, x = Around(by_counting).to(device), torch.randn(6, 8, device=device)
    if choice == "error":
        with pytest.raises(fxgraph.UncapturableError, match="bincount"):
            fxgraph.make_graphed_callables(module, (x,), options={"on_uncapturable": choice})
        return
    with pytest.warns(fxgraph.EagerFallbackWarning, match="bincount"):
        graphed = fxgraph.make_graphed_callables(module, (x,), options={"on_uncapturable": choice})
    graphed(x)
    assert not fxgraph.stats(graphed).captures


def test_the_warning_says_what_runs_eagerly_and_where(device: str) -> None:
    with pytest.warns(fxgraph.EagerFallbackWarning, match=r"captured in parts: .*torch.bincount.*test_stages.py:\d+"):
        graphed = fxgraph.make_graphed_callables(Around(by_counting).to(device), (torch.randn(6, 8, device=device),))
    graphed(torch.randn(6, 8, device=device))
    ((reason, calls),) = fxgraph.stats(graphed).eager_reasons.items()
    assert "data-dependent-shape" in reason
    assert calls == 1


@pytest.mark.filterwarnings(EXPECTED)
@pytest.mark.parametrize(("least", "captures"), [(1, 2), (2, 2), (3, 1), (100, 0)])
def test_small_parts_run_eagerly(least: int, captures: int, device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos().exp()
        return (y + torch.bincount((y.sum(1) > 0).long(), minlength=2).sum()).tanh()

    x = torch.randn(3, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        graphed = fxgraph.make_graphed_callables(function, (x,), options={"min_region_ops": least})
    torch.testing.assert_close(graphed(x), function(x), rtol=0, atol=0)
    assert len(fxgraph.stats(graphed).captures) == captures


def test_a_block_marked_as_eager(device: str) -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.before(x)
            with fxgraph.eager():
                seen.append(hidden.detach().sum().item())
            return self.after(hidden)

    seen: list[float] = []
    eager, x = Marked().to(device), torch.randn(3, 8, device=device)
    graphed = torch.compile(copy.deepcopy(eager), backend="graphed")
    for _ in range(2):
        torch.testing.assert_close(graphed(x), eager(x), rtol=0, atol=0)
    assert len(seen) == 4
    assert torch.compiler.is_compiling() is False


class Layers(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = marked(layer(x))
        return x


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("layer", "captures"), [(nn.Linear, 0), (Layer, 2)])
def test_a_break_in_a_loop_is_said_and_counted(layer: Callable[..., nn.Module], captures: int, device: str) -> None:
    torch.manual_seed(0)
    module, x = Layers(lambda: layer(4, 4)).to(device), torch.randn(3, 4, device=device)
    expected = module(x)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="is captured in parts"):
        graphed = fxgraph.make_graphed_callables(module, (x,))
    nothing = pytest.warns(fxgraph.EagerFallbackWarning, match="nothing of Layers is captured.*loop")
    with contextlib.nullcontext() if captures else nothing:
        assert torch.equal(graphed(x), expected)
    assert torch.equal(graphed(x), expected)  # without a warning
    stats = fxgraph.stats(graphed)
    assert (len(stats.captures), stats.replays) == (captures, 2 * captures)
    ((reason, count),) = stats.eager_reasons.items()
    assert "marked" in reason and count == 2


class Logged(nn.Module):
    """Scales, and counts its calls in a way that no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("last", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        self.calls += 1
        self.last.fill_(x.detach().sum().item())
        return x * self.scale + shift


def test_a_marked_module_stays_the_module_that_it_is() -> None:
    plain, module = Logged(), Logged()
    assert fxgraph.eager(module) is module
    assert fxgraph.eager(module) is module  # twice is once
    assert type(module) is Logged
    assert list(module.state_dict()) == list(plain.state_dict()) == ["scale", "last"]
    assert [name for name, _ in module.named_modules()] == [""]
    module.load_state_dict(plain.state_dict())
    x = torch.arange(8.0)
    assert torch.equal(module(x, shift=1.0), plain(x, shift=1.0))
    assert (module.calls, module.last.item()) == (1, 28.0)
    assert not module.eval().training


@pytest.mark.filterwarnings(EXPECTED)
# Dynamo, reading the second part, looks at `.grad` of what the first gave.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("copied", [lambda one: one, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
def test_a_marked_module_and_its_copies_run_eagerly_between_captured_parts(
    entry: str, copied: Callable[[Any], Any], device: str
) -> None:
    torch.manual_seed(3)
    plain = Around(Logged()).eval().to(device)
    marked = copy.deepcopy(plain)
    fxgraph.eager(marked.between)
    model = copied(marked)
    gc.collect()
    before = fxgraph.stats().replays
    x = torch.randn(6, 8, device=device)
    if entry == "torch.compile":
        graphed: Any = torch.compile(model, backend="graphed")
    else:
        graphed = fxgraph.make_graphed_callables(model, (x,))
    calls = model.between.calls
    for step in range(2):
        got, want = graphed(x), plain(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        got.sum().backward()
        want.sum().backward()
        assert model.between.calls == calls + step + 1
    torch.testing.assert_close(model.between.scale.grad, plain.between.scale.grad, rtol=0, atol=0)
    assert model.between.last.item() == plain.between.last.item()
    assert fxgraph.stats().replays - before == 4  # what comes before and after, twice
    if model is not marked:
        assert marked.between.calls == 0


def test_a_module_with_a_forward_of_its_own_keeps_it() -> None:
    module = Logged()
    module.forward = lambda x: x - 1
    assert torch.equal(fxgraph.eager(module)(torch.ones(2)), torch.zeros(2))


def test_eager_decorates_with_parentheses_too(device: str) -> None:
    runs: list[float] = []

    @fxgraph.eager()
    def note(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.detach().sum().item())
        return x * 2

    assert note.__name__ == "note"
    compiled = torch.compile(lambda x: note(x.sin() + 1).cos() + 1, backend="graphed")
    x = torch.randn(3, device=device)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), ((x.sin() + 1) * 2).cos() + 1, rtol=0, atol=0)
    assert len(runs) == 2


def test_eager_takes_functions_and_modules_only() -> None:
    with pytest.raises(TypeError, match="takes a function, a module or nothing"):
        fxgraph.eager(3)


# -- outputs that feed others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "captures"),
    [
        (lambda x, w: (lambda y: (y, y.square().sum()))((x @ w).tanh()), 2),
        (lambda x, w: (lambda y: (y, y.argmax(1), y.detach() * 2))((x @ w).tanh()), 1),  # no gradient comes back
        (lambda x, w: (lambda y: (y, y.t(), y[0]))((x @ w).tanh()), 1),  # views are made of the output itself
        (lambda x, w: (x, (x @ w).tanh()), 1),
    ],
)
def test_graphs_are_cut_where_gradients_come_back_to_an_output(
    function: Callable[..., Any], captures: int, device: str
) -> None:
    x, w = torch.randn(3, 4, device=device), torch.randn(4, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x, w), allow_unused_input=True)
    assert len(fxgraph.stats(graphed).captures) == captures
    torch.testing.assert_close(graphed(x, w), function(x, w), rtol=0, atol=0)


@pytest.mark.parametrize("least", [2, 100])
def test_an_output_that_feeds_another_one_can_be_differentiated_by_however_small_the_parts(
    least: int, device: str
) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.tanh()
        return y, y.sum()

    x = torch.randn(3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,), options={"min_region_ops": least})
    y, total = graphed(x)
    torch.testing.assert_close(torch.autograd.grad(total, y), (torch.ones(3, device=device),))
    assert len(fxgraph.stats(graphed).captures) == 2


# -- passes of the user's ---------------------------------------------------------------------------------------------


def relu_to_gelu(graph: fx.GraphModule) -> fx.GraphModule:
    for node in graph.graph.find_nodes(op="call_function", target=F.relu):
        node.target, node.kwargs = F.gelu, {}
    graph.recompile()
    return graph


class ReluToGelu(PassBase):
    def call(self, graph_module: fx.GraphModule) -> PassResult:
        return PassResult(relu_to_gelu(graph_module), True)


@pytest.mark.parametrize("chosen", [relu_to_gelu, ReluToGelu()], ids=["function", "PassBase"])
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
def test_passes_of_the_users_change_forward_and_backward(chosen: Any, entry: str, device: str) -> None:
    eager = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    other.load_state_dict(eager.state_dict())
    if entry == "torch.compile":
        graphed: Any = torch.compile(other, backend="graphed", options={"passes": [chosen]})
    else:
        sample = torch.randn(3, 8, device=device)
        graphed = fxgraph.make_graphed_callables(other, (sample,), options={"passes": [chosen]})
    x = torch.randn(3, 8, device=device)
    for module in (eager, graphed):
        module(x).square().sum().backward()
    for mine, its in zip(other.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


def without_the_host(graph: fx.GraphModule) -> None:
    """Compute on the device what a custom op computes on the host."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.fxgraph_tests.on_the_host.default):
        node.target, node.args, node.kwargs = torch.mul, (node.args[0], 2), {}
    graph.recompile()


def without_counting(graph: fx.GraphModule) -> None:
    """Put what has a fixed size in the place of a ``bincount``, as the rule's hint says."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.bincount):
        with graph.graph.inserting_before(node):
            rows = graph.graph.call_function(F.one_hot, (node.args[0], 2))
            counts = graph.graph.call_function(torch.sum, (rows, 0))
        node.replace_all_uses_with(counts)
        graph.graph.erase_node(node)
    graph.recompile()


def without_numbers(graph: fx.GraphModule) -> None:
    """Multiply by the tensor in the place of its ``item()``."""
    for node in graph.graph.find_nodes(op="call_method", target="item"):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()


def with_counting(graph: fx.GraphModule) -> None:
    """The other way round: put in what no graph can hold."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.relu):
        node.target = torch.nonzero
    graph.recompile()


def counted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + torch.bincount((x.sum(1) > 0).long(), minlength=2)


def by_its_maximum(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.abs().max().item()


def through_the_host(x: torch.Tensor) -> torch.Tensor:
    return on_the_host(x.sin()).cos()


@pytest.mark.parametrize("choice", ["split", "eager", "error"])
@pytest.mark.parametrize(
    ("function", "chosen"),
    [(through_the_host, without_the_host), (counted, without_counting), (by_its_maximum, without_numbers)],
)
def test_the_graph_is_judged_as_passes_of_the_users_leave_it(
    function: Callable[..., Any], chosen: Any, choice: str, device: str
) -> None:
    x = torch.randn(4, 2, device=device)
    graphed = fxgraph.make_graphed_callables(function, (x,), options={"passes": [chosen], "on_uncapturable": choice})
    torch.testing.assert_close(graphed(x), function(x), rtol=0, atol=0)
    stats = fxgraph.stats(graphed)
    assert (stats.replays, stats.eager_calls, len(stats.captures)) == (1, 0, 1)


@pytest.mark.parametrize("choice", ["split", "eager", "error"])
def test_so_is_the_graph_of_torch_compile(choice: str, device: str) -> None:
    gc.collect()  # programs of tests before this one count until they are gone
    x, before = torch.randn(4, 2, device=device), fxgraph.stats()
    options = {"passes": [without_the_host], "on_uncapturable": choice}
    graphed = torch.compile(through_the_host, backend="graphed", options=options)
    torch.testing.assert_close(graphed(x), through_the_host(x), rtol=0, atol=0)
    after = fxgraph.stats()
    assert (after.replays - before.replays, after.eager_calls - before.eager_calls) == (1, 0)


def test_what_a_pass_puts_in_is_refused(device: str) -> None:
    x = torch.randn(4, 2, device=device)
    options = {"passes": [with_counting], "on_uncapturable": "error"}
    with pytest.raises(fxgraph.UncapturableError, match="nonzero") as caught:
        fxgraph.make_graphed_callables(lambda x: torch.relu(x).shape[0] * x, (x,), options=options)
    assert caught.value.id == "data-dependent-shape"


@pytest.mark.filterwarnings("ignore:.*runs eagerly:fxgraph.EagerFallbackWarning")
def test_what_runs_eagerly_runs_as_the_passes_left_it(device: str) -> None:
    x = torch.randn(4, 2, device=device)
    options = {"passes": [relu_to_gelu], "on_uncapturable": "eager"}
    graphed = fxgraph.make_graphed_callables(lambda x: counted(F.relu(x)), (x,), options=options)
    torch.testing.assert_close(graphed(x), counted(F.gelu(x)), rtol=0, atol=0)
    assert not fxgraph.stats(graphed).captures
    assert fxgraph.stats(graphed).eager_calls == 1


def drops_an_output(graph: fx.GraphModule) -> None:
    output = graph.graph.output_node()
    output.args = (tuple(output.args[0])[:-1],)
    graph.recompile()


def raises(graph: fx.GraphModule) -> None:
    raise ValueError("not this one")


def replaces_the_result(graph: fx.GraphModule, by: str, *args: Any) -> None:
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        output.args = ((graph.graph.call_method(by, (output.args[0][0], *args)),),)
    graph.recompile()


def gives_another_shape(graph: fx.GraphModule) -> None:
    replaces_the_result(graph, "unsqueeze", 0)


def gives_another_dtype(graph: fx.GraphModule) -> None:
    replaces_the_result(graph, "double")


def calls_what_fails(graph: fx.GraphModule) -> None:
    replaces_the_result(graph, "view", 7)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (drops_an_output, "outputs"),
        (raises, "not this one"),
        (gives_another_shape, r"output 0 is torch.float32 of shape \(1, 2\).*, not torch.float32 of shape \(2,\)"),
        (gives_another_dtype, "output 0 is torch.float64"),
        (calls_what_fails, r"an op of the graph fails: Tensor.view \(node view.*\): shape '\[7\]' is invalid"),
    ],
)
def test_a_bad_pass_is_named(bad: Callable[..., Any], words: str, device: str) -> None:
    with pytest.raises(passes.PassError, match=words) as caught:
        fxgraph.make_graphed_callables(torch.sin, (torch.ones(2, device=device),), options={"passes": [bad]})
    assert bad.__name__ in str(caught.value)


def test_passes_must_be_callable() -> None:
    with pytest.raises(fxgraph.OptionError, match="a list of passes"):
        fxgraph.Options(passes=[3])


def test_each_reason_for_a_cut_is_said_once_in_the_order_of_the_program(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.exp().sin()
        scale = h.sum().item()
        places = h.nonzero()
        return (h * scale).sum() + places.sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fxgraph.make_graphed_callables(function, (torch.randn(4, device=device, requires_grad=True),))
    messages = [str(one.message) for one in said if issubclass(one.category, fxgraph.EagerFallbackWarning)]
    assert ["[host-sync]" in message for message in messages] == [True, False]
    assert ["[data-dependent-shape]" in message for message in messages] == [False, True]


def in_a_loop(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for module in (first, second):
        x = module(x)
        print(end="")  # noqa: T201  # breaks the graph
    return x


def beside_a_with(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = first(x)
    with fxgraph.eager():
        scale = x.mean().item()
    return second(x) * scale


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("function", [in_a_loop, beside_a_with])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=["Sequential", "TransformerEncoderLayer"],
)
def test_torchs_own_modules_are_captured_where_dynamo_does_not_go_on(
    function: Callable[..., Any], make: Callable[[], nn.Module], device: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(), make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.first, self.second, x)

    eager = Model().to(device)
    x = torch.randn(2, 4, 8, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,))
    for _ in range(3):
        results = []
        for module in (eager, graphed):
            module.zero_grad()
            out = module(x)
            out.square().mean().backward()
            results.append([out, *[p.grad for p in module.parameters()]])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert len(fxgraph.stats(graphed).captures) == 2
