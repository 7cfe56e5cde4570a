"""``kernels="inductor"``: the contract holds as with aten kernels, and numbers equal eager's up to rounding.

What is compared with a tolerance is compared with torch's own for the dtype (``torch.testing.assert_close``); random
draws, random states, strides, flags, structure and version counters are the same.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import twins
from torch import nn
from torch._inductor import compile_fx, metrics
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins, assert_same

import fxgraph
from fxgraph import compiling, effects, engines, plan
from fxgraph._torch_compat import inductor
from fxgraph._torch_compat.autograd import kernels_only
from fxgraph.engines import cpu, cuda
from fxgraph.graphed import GraphedCallable
from fxgraph.slots import Capture

INDUCTOR = {"kernels": "inductor"}


@pytest.fixture(autouse=True)
def _rounding_of_other_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU sums run in another order than in eager's kernels (seen on an H200: 5e-5, a convolution's gradients)."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda":
        monkeypatch.setitem(twins.CLOSE, "rtol", 1e-3)
        monkeypatch.setitem(twins.CLOSE, "atol", 1e-4)


class Net(nn.Module):
    """State, random numbers, something to fuse, two outputs of which one is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.layer_norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        hidden = F.dropout(F.gelu(self.norm(self.first(x))), 0.25, self.training)
        hidden = self.layer_norm(hidden)
        return self.second(F.dropout(hidden, 0.5, self.training)), hidden.tanh().t()


def sample(device: str, grad: bool = False) -> torch.Tensor:
    return torch.randn(6, 3, device=device, requires_grad=grad)


def net_twins(device: str, grad: bool = False, **options: Any) -> Twins:
    return Twins(Net(), sample(device, grad), device=device, options={**INDUCTOR, **options})


def capture_of(module: Any) -> Capture:
    graphed = module if isinstance(module, GraphedCallable) else module.__dict__["forward"]
    (program,) = graphed.programs()
    (capture,) = program.captures.values()
    return capture


def step(x: torch.Tensor) -> Callable[[types.SimpleNamespace], Any]:
    def run(side: types.SimpleNamespace) -> list[torch.Tensor]:
        y, z = side.module(x)
        (y.square().mean() + z.mean()).backward()
        return [y.detach(), z.detach()]

    return run


def evaluate(side: types.SimpleNamespace) -> None:
    side.module.eval()


# -- as eager, up to rounding -----------------------------------------------------------------------------------------


def test_training_is_eagers(device: str) -> None:
    twins = net_twins(device)
    for side in (twins.eager, twins.graphed):
        side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.1, momentum=0.9)
    for k in range(4):
        twins.both(step(sample(device)), f"step {k}", exact=False)
        if k != 1:  # once the gradients are added up
            twins.both(lambda side: side.optimizer.step(), exact=False)
            twins.both(lambda side: side.optimizer.zero_grad(), exact=False)
    twins.both(evaluate, exact=False)
    twins.both(step(sample(device)), "in eval mode", exact=False)
    twins.assert_replayed(5)


def test_the_torch_compile_entry_is_eagers(device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="graphed", options=INDUCTOR)
    gc.collect()
    before = fxgraph.stats()
    for seed in range(3):
        x = sample(device)
        found = []
        for run in (compiled, twin):
            torch.manual_seed(seed)
            y, z = run(x)
            (y.square().mean() + z.mean()).backward()
            found.append([y, z, torch.rand(1)])
        assert_same(*found, exact=False)
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert_same(mine.grad, its.grad, exact=False)
    assert_same(dict(module.state_dict()), dict(twin.state_dict()), exact=False)
    after = fxgraph.stats()
    assert (after.replays - before.replays, after.eager_calls - before.eager_calls) == (3, 0)


def test_compiled_kernels_are_what_is_captured(device: str) -> None:
    twins = net_twins(device)
    regions = capture_of(twins.graphed.module).regions
    assert isinstance(regions.forward, inductor.CompiledGraph)
    assert isinstance(regions.backward, inductor.CompiledGraph)
    before = metrics.generated_kernel_count
    for _ in range(2):
        twins.both(step(sample(device)), exact=False)
    assert metrics.generated_kernel_count == before, "a replay compiled something"


def test_outputs_that_are_kept_stay(device: str) -> None:
    twins = net_twins(device)
    for side in (twins.eager, twins.graphed):
        side.kept = []

    def keep(side: types.SimpleNamespace) -> list[Any]:
        outputs = side.module(x)
        side.kept.append([out.detach() for out in outputs])
        sum(out.mean() for out in outputs).backward()
        return side.kept

    for _ in range(4):
        x = sample(device)
        twins.both(keep, exact=False)


def test_forwards_in_flight_and_backwards_in_reverse(device: str) -> None:
    twins = net_twins(device, max_in_flight=3)
    xs = [sample(device) for _ in range(3)]

    def run(side: types.SimpleNamespace) -> list[torch.Tensor]:
        outputs = [side.module(x) for x in xs]
        for y, z in reversed(outputs):
            (y.mean() + z.square().mean()).backward()
        return [y.detach() for y, _ in outputs]

    for _ in range(2):
        twins.both(run, exact=False)
    twins.assert_replayed(6)


def test_a_second_backward_with_retain_graph(device: str) -> None:
    twins = net_twins(device)
    x = sample(device)

    def run(side: types.SimpleNamespace) -> None:
        y, z = side.module(x)
        loss = y.square().mean() + z.mean()
        loss.backward(retain_graph=True)
        loss.backward()

    twins.both(run, exact=False)


def test_gradients_of_some_outputs_and_none_for_the_rest(device: str) -> None:
    twins = net_twins(device, grad=True)
    x = sample(device, grad=True)

    def run(side: types.SimpleNamespace) -> list[Any]:
        _, z = side.module(x)
        z.mean().backward()
        gradients, x.grad = [x.grad, side.module.second.weight.grad], None
        return gradients

    assert twins.both(run, exact=False)[1] is None
    twins.assert_replayed(1)


def test_gradients_of_gradients(device: str) -> None:
    twins = net_twins(device, grad=True)
    x = sample(device, grad=True)

    def run(side: types.SimpleNamespace) -> list[Any]:
        y, z = side.module(x)
        (gradient,) = torch.autograd.grad(y.square().sum() + z.sum(), x, create_graph=True)
        gradient.square().sum().backward()
        second, x.grad = x.grad, None
        return [gradient.detach(), second]

    # The buffer that counts the calls is changed in place and its former value used: refused, as with aten kernels.
    with pytest.raises(fxgraph.DoubleBackwardError, match="double-backward"):
        run(twins.graphed)


def test_gradients_of_gradients_where_the_forward_can_be_repeated(device: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    twins = Twins(module, sample(device, grad=True), device=device, options=INDUCTOR)
    x = sample(device, grad=True)

    def run(side: types.SimpleNamespace) -> list[Any]:
        (gradient,) = torch.autograd.grad(side.module(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        second, x.grad = x.grad, None
        return [gradient.detach(), second]

    twins.both(run, exact=False)
    twins.assert_replayed(1)


def test_a_batch_of_tangents_and_tangents_of_any_layout(device: str) -> None:
    twins = net_twins(device, grad=True)
    x = sample(device, grad=True)

    def batched(side: types.SimpleNamespace) -> Any:
        y, z = side.module(x)
        rows = torch.eye(4, device=device).unsqueeze(1).expand(4, 6, 4)
        return torch.autograd.grad((y, z), x, (rows, torch.zeros(4, 8, 6, device=device)), is_grads_batched=True)

    def spread(side: types.SimpleNamespace) -> Any:
        y, z = side.module(x)
        tangent = torch.linspace(0, 1, 24, device=device).view(4, 6).t()
        return torch.autograd.grad((y, z), x, (tangent, torch.ones(1, 6, device=device).expand(8, 6)))

    captured = capture_of(twins.graphed.module)
    twins.both(batched, exact=False)
    twins.both(spread, exact=False)
    twins.both(step(x), exact=False)
    assert len(captured.slots) == 1 and not captured.slots[0].outdated, "captured anew for a layout"


def test_a_gradient_that_is_held_is_not_overwritten(device: str) -> None:
    twins = net_twins(device)
    for side in (twins.eager, twins.graphed):
        side.kept = []

    def run(side: types.SimpleNamespace) -> list[Any]:
        side.module.zero_grad()
        step(x)(side)
        side.kept.append([p.grad for p in side.module.parameters()])
        return side.kept

    for _ in range(3):
        x = sample(device)
        twins.both(run, exact=False)


def test_the_statistics_of_batch_norm_are_written_without_a_version_and_other_buffers_with_one(device: str) -> None:
    twins = net_twins(device)

    def versions(side: types.SimpleNamespace) -> list[int]:
        step(x)(side)
        buffers = dict(side.module.named_buffers())
        return [buffers[name]._version for name in ("norm.running_mean", "norm.running_var", "calls")]

    for side in (twins.eager, twins.graphed):
        side.before = [buffer._version for buffer in side.module.buffers()]
    x = sample(device)
    found = [versions(side) for side in (twins.eager, twins.graphed)]
    moved = [
        [after - before for after, before in zip(result, [side.before[1], side.before[2], side.before[0]], strict=True)]
        for result, side in zip(found, (twins.eager, twins.graphed), strict=True)
    ]
    assert moved[0] == moved[1] == [0, 0, 1]


def test_without_gradients_and_in_inference_mode(device: str) -> None:
    twins = net_twins(device)
    x = sample(device)
    for mode in (torch.no_grad, torch.inference_mode):

        def run(side: types.SimpleNamespace, mode: Any = mode) -> Any:
            with mode():
                return side.module(x)

        for _ in range(2):
            twins.both(run, exact=False)
    twins.assert_replayed(4)


def test_captured_in_inference_mode_or_inside_of_a_checkpoint(device: str) -> None:
    twins = net_twins(device)
    x = torch.randn(5, 3, device=device)  # another signature, captured where it is met
    with torch.inference_mode():
        twins.both(lambda side: side.module(x), exact=False)

    def checkpointed(side: types.SimpleNamespace) -> torch.Tensor:
        y, z = checkpoint(side.module, x, use_reentrant=False)
        (y.square().mean() + z.mean()).backward()
        return y.detach()

    twins.both(evaluate, exact=False)
    twins.both(checkpointed, exact=False)
    assert twins.stats.replays == 3


class Counting(nn.Module):
    """Uses a buffer and then changes it: what the backward computes again must not read the changed one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = self.calls * 2
        y = (x * doubled * self.weight).sin()
        self.calls.add_(1)
        return y


def test_the_backward_does_not_read_what_the_forward_has_written(device: str) -> None:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    twins = Twins(Counting(), x, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> Any:
        return torch.autograd.grad(side.module(x).sum(), [x, side.module.weight])

    for _ in range(3):
        twins.both(run, exact=False)
    twins.assert_replayed(3)


def test_samples_that_share_memory(device: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    memory = torch.randn(5, device=device)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="shares memory"):
        graphed = fxgraph.make_graphed_callables(function, (memory[1:], memory[:-1]), options=INDUCTOR)
    other = memory.clone()
    assert torch.equal(graphed(memory[1:], memory[:-1]), function(other[1:], other[:-1]))


# -- more kinds of programs -------------------------------------------------------------------------------------------


class Changing(nn.Module):
    """Changes an input in place, returns it, a view of it, and two outputs in one memory."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total.add_(x.square())
        y = x.exp() + total
        return total, total[0], y, y.view(-1), y.sum(0)


@pytest.mark.parametrize("grad", [True, False])
def test_changed_inputs_and_outputs_that_are_views(device: str, grad: bool) -> None:
    x, total = torch.randn(2, 3, device=device, requires_grad=grad), torch.zeros(2, 3, device=device)
    twins = Twins(Changing(), x, total, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> list[Any]:
        mine = start.clone()
        outputs = side.module(x, mine)
        assert outputs[0] is mine
        if grad:
            (outputs[1].sum() + outputs[3].square().sum() + outputs[4].sum()).backward()
            gradient, x.grad = x.grad, None
            return [*(out.detach() for out in outputs), gradient]
        outputs[3][0] = 7.0  # seen in the third output, whose memory it shares
        return list(outputs)

    for _ in range(2):
        start = torch.randn(2, 3, device=device)
        twins.both(run, exact=False)
    assert twins.stats.replays and not twins.stats.eager_calls


class Branches(nn.Module):
    """Random numbers in branches that do not depend on each other, some of them for one output alone."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        late = torch.rand_like(x)
        one = F.dropout(x * 2, 0.5).tanh()
        other = F.dropout(x.t() + 1, 0.25)
        noise = torch.randn(3, device=x.device) + torch.bernoulli(torch.full_like(x[0], 0.5))
        return (
            one.sum(1),
            other * noise.unsqueeze(1),
            late + F.rrelu(x, training=True),
            torch.randperm(4, device=x.device),
        )


class Normed(nn.Module):
    """A reduction over rows, and dropout of what is computed from it: loops of two shapes around a random op."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.dropout(self.norm(self.inner(x)).tanh(), 0.25))


def test_random_numbers_are_drawn_before_they_are_read(device: str) -> None:
    """Inductor's own ``bernoulli`` in place is scheduled after the loop that reads it."""
    x = torch.randn(5, 3, device=device)
    twins = Twins(Normed(), x, device=device, options=INDUCTOR)
    for _ in range(3):
        twins.both(lambda side: side.module(x).detach(), exact=False)


@pytest.mark.parametrize("ci", [False, True])
def test_random_numbers_are_drawn_in_eagers_order(ci: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CI set inductor is stricter about ops that it could decompose."""
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", "true")
    x = sample(device, grad=True)
    with torch._inductor.config.patch(fx_graph_cache=False):
        twins = Twins(Branches(), x, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> list[Any]:
        outputs = side.module(x)
        sum(out.sum() for out in outputs[:3]).backward()
        gradient, x.grad = x.grad, None
        return [*(out.detach() for out in outputs), gradient]

    for _ in range(3):
        twins.both(run, exact=False)
    twins.assert_replayed(3)


@pytest.mark.parametrize("stage", ["_recursive_joint_graph_passes", "compile_fx_inner"])
def test_what_inductor_draws_to_choose_kernels_is_put_back(
    device: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """It times candidates on random numbers: of a product, padded or not, while it rewrites the joint graph."""
    inner, times = getattr(compile_fx, stage), []

    def drawing(*args: Any, **kwargs: Any) -> Any:
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            times.append((torch.rand(3), torch.rand(3, device=device)))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, stage, drawing)
    layer, x = nn.Linear(3, 2).to(device), sample(device)
    before = twins.rng_state(device)
    fxgraph.make_graphed_callables(layer, (x,), options=INDUCTOR)
    assert times
    assert all(map(torch.equal, twins.rng_state(device), before)), "graphing drew random numbers"


class Images(nn.Module):
    """Convolutions, whose layout inductor likes to choose itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.norm(self.conv(x)))
        return self.last(F.interpolate(F.max_pool2d(y, 2), scale_factor=2.0)), y.permute(0, 3, 1, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_gradients_have_eagers_strides(device: str, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 8, 8, device=device).to(memory_format=layout).requires_grad_()
    twins = Twins(Images().to(memory_format=layout), x, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> list[Any]:
        y, z = side.module(x)
        (y.square().mean() + z.mean()).backward()
        gradient, x.grad = x.grad, None
        return [y.detach(), z.detach(), gradient]

    for _ in range(2):
        twins.both(run, exact=False)
    twins.assert_replayed(2)


def test_under_autocast(device: str) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    twin, x = copy.deepcopy(module), torch.randn(8, 16, device=device)
    results = []
    with torch.autocast(device, torch.bfloat16):
        graphed = fxgraph.make_graphed_callables(module, (x,), options=INDUCTOR)
    for side in (graphed, twin):
        with torch.autocast(device, torch.bfloat16):
            y = side(x)
        y.float().square().mean().backward()
        results.append([y.detach(), *[p.grad for p in side.parameters()]])
    for found, expected in zip(*results, strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)  # a few units of bfloat16's last place
    assert fxgraph.stats(graphed).replays == 1


def _float32_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = x @ w
    return y.tanh() @ w


def _attention_with_dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.tanh(), q.sin(), dropout_p=0.2)


@pytest.mark.parametrize("function", [_float32_inside, _attention_with_dropout])
def test_what_autocast_leaves_in_float32_is_saved_as_such(function: Any, device: str) -> None:
    """Fake values made anew under autocast said bfloat16 of what the forward gives in float32."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    results = []
    for graph in (False, True):
        inputs = [t.clone().requires_grad_() for t in (x, w)]
        with torch.autocast(device, torch.bfloat16):
            call = function
            if graph:
                sample = tuple(t.detach().clone().requires_grad_() for t in inputs)
                call = fxgraph.make_graphed_callables(function, sample, options=INDUCTOR)
            torch.manual_seed(1)
            y = call(*inputs)
        y.float().square().sum().backward()
        results.append([y.detach(), *(t.grad for t in inputs)])
    for expected, found in zip(*results, strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * largest)  # some units of the last place


class ByHand(nn.Module):
    """Attention as one writes it; inductor has an op for it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (q @ k.transpose(-2, -1) / 4.0).softmax(-1)
        return weights @ v, v.sum()


def test_attention_written_by_hand_and_a_gradient_of_one_output(device: str) -> None:
    tensors = [torch.randn(2, 4, 8, 16, device=device, requires_grad=True) for _ in range(3)]
    twins = Twins(ByHand(), *tensors, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace, which: Any = slice(2)) -> list[Any]:
        outputs = side.module(*tensors)
        return torch.autograd.grad([out.sum() for out in outputs[which]], tensors, allow_unused=True)

    twins.both(run, exact=False)
    twins.both(lambda side: run(side, slice(1)), exact=False)
    twins.both(lambda side: run(side, slice(1, 2)), exact=False)
    twins.assert_replayed(3)


def test_stages_are_compiled_each(device: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.first(x)) + 1
            return F.gelu(self.second(hidden * hidden.detach().abs().max().item()))

    x = sample(device)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="captured in parts"):
        twins = Twins(Parts(), x, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> torch.Tensor:
        y = side.module(x)
        y.sum().backward()
        return y.detach()

    twins.both(run, exact=False)
    assert twins.stats.replays == 2


def test_replaced_parameters_and_another_signature(device: str) -> None:
    twins = net_twins(device)
    twins.both(step(sample(device)), exact=False)
    doubled = {name: 2 * value for name, value in twins.eager.module.state_dict().items()}
    copies = {name: value.clone() for name, value in doubled.items()}
    twins.eager.module.load_state_dict(doubled, assign=True)
    twins.graphed.module.load_state_dict(copies, assign=True)
    twins.both(step(sample(device)), exact=False)
    twins.both(step(torch.randn(4, 3, device=device)), exact=False)
    twins.assert_replayed(3)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_allows_for_the_rounding_of_other_kernels(device: str) -> None:
    twins = net_twins(device, verify=2)
    for _ in range(3):
        twins.both(step(sample(device)), exact=False)
    twins.assert_replayed(3)


@pytest.mark.parametrize(("region", "id"), [("forward", "verify-forward"), ("backward", "verify-backward")])
def test_verify_finds_a_wrong_kernel(device: str, region: str, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = inductor.CompiledGraph._separate

    def wrong(self: Any, inputs: Any, outputs: Any) -> Any:
        outputs = real(self, inputs, outputs)
        if self._backward == (region == "backward"):
            outputs[0].mul_(1.01)
        return outputs

    monkeypatch.setattr(inductor.CompiledGraph, "_separate", wrong)
    module = Net().to(device)
    graphed = fxgraph.make_graphed_callables(module, (sample(device),), options={**INDUCTOR, "verify": 1})
    with pytest.raises(fxgraph.VerifyError, match=id):
        step(sample(device))(types.SimpleNamespace(module=graphed))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_in_the_graph_are_added_by_hand_to_what_the_region_leaves(device: str, set_to_none: bool) -> None:
    twins = net_twins(device, grads="in_graph")
    capture = capture_of(twins.graphed.module)
    optimizers = [torch.optim.SGD(side.module.parameters(), 0.01) for side in (twins.eager, twins.graphed)]
    addresses = set()

    def micro_batches(side: types.SimpleNamespace) -> None:
        for x in inputs:
            step(x)(side)

    for _ in range(3):
        inputs = [sample(device), sample(device, grad=True)]
        twins.both(micro_batches, exact=False)
        addresses.add(tuple(p.grad.data_ptr() for p in twins.graphed.module.parameters() if p.grad is not None))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert len(addresses) == 1
    twins.assert_replayed(6)
    (slot,) = capture.slots
    assert capture.accumulator is not None and len(capture.accumulator.positions) == 8
    assert not slot.accumulating and slot.backward is not None and not slot.outdated


# -- what cannot be compiled ------------------------------------------------------------------------------------------


@pytest.fixture
def cannot_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more lines")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fail)
    yield


def test_what_cannot_be_compiled_runs_on_aten_kernels(device: str, cannot_compile: None) -> None:
    with pytest.warns(fxgraph.KernelFallbackWarning, match="RuntimeError: no compiler here") as caught:
        twins = net_twins(device)
    assert len(caught) == 1 and "and more" not in str(caught[0].message)
    exact = device == "cpu"
    for _ in range(2):
        twins.both(step(sample(device)), exact=exact)
    twins.assert_replayed(2)


def test_it_is_said_once_per_reason(cannot_compile: None) -> None:
    with pytest.warns(fxgraph.KernelFallbackWarning):
        twins = net_twins("cpu")
    state = {name: value.clone() for name, value in twins.graphed.module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.graphed.module.load_state_dict(state, assign=True)  # another capture of the same program
        step(sample("cpu"))(twins.graphed)
    assert twins.stats.eager_calls == 0


def test_what_cannot_be_planned_with_inductors_ops_runs_on_aten_kernels(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = plan.make

    def make(joint: Any) -> Any:
        if joint.for_inductor:
            raise effects.CannotPlan("not this way")
        return real(joint)

    monkeypatch.setattr(plan, "make", make)
    with pytest.warns(fxgraph.KernelFallbackWarning, match="not this way"):
        twins = net_twins(device)
    twins.both(step(sample(device)), exact=device == "cpu")
    twins.assert_replayed(1)


def test_an_lstm_on_the_cpu_runs_on_aten_kernels() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    x = torch.randn(5, 2, 3)
    with pytest.warns(fxgraph.KernelFallbackWarning, match="mkldnn_rnn_layer"):
        twins = Twins(Last(), x, device="cpu", options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> torch.Tensor:
        y = side.module(x)
        y.sum().backward()
        return y.detach()

    for _ in range(2):
        twins.both(run)
    twins.assert_replayed(2)


class Rows(nn.Module):
    """Saves views that begin within a vector's width of their memory, and reads a parameter that does."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(memory[1:6])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = (x * x + 1).unbind()
        return (first.sin() * second.exp() * third.cos() * self.weight).sum()


def test_memory_that_is_not_aligned(device: str) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)
    module = Rows(torch.randn(8, device=device))
    assert module.weight.data_ptr() % 16

    def run() -> list[torch.Tensor]:
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y, [x, module.weight])]

    expected = run()
    fxgraph.make_graphed_callables(module, (x,), options=INDUCTOR)
    assert_same(run(), expected, exact=False)
    assert fxgraph.stats(module).replays == 1


# Before torch 2.13 inductor gives up on a complex constant.
@pytest.mark.filterwarnings("ignore:.*runs with aten kernels:fxgraph.KernelFallbackWarning")
def test_complex_numbers(device: str) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.rfft(x) * 2j).abs().square() + x.sum()

    x = torch.randn(4, 8, device=device, requires_grad=True)
    twins = Twins(Spectrum(), x, device=device, options=INDUCTOR)

    def run(side: types.SimpleNamespace) -> list[Any]:
        y = side.module(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), x)]

    twins.both(run, exact=False)
    twins.assert_replayed(1)


# -- how engines capture it -------------------------------------------------------------------------------------------


def compiled_of(device: str) -> tuple[Capture, inductor.CompiledGraph, list[torch.Tensor]]:
    twins = net_twins(device)
    capture = capture_of(twins.graphed.module)
    assert isinstance(capture.regions.backward, inductor.CompiledGraph)
    return capture, capture.regions.backward, capture.slots[0].backward_inputs()


def test_the_cpu_engine_records_kernels_and_operators() -> None:
    _, region, inputs = compiled_of("cpu")
    tape = cpu._Tape()
    with kernels_only():
        outputs = cpu._record_compiled(region, tape, inputs)
        expected = region(*inputs)
    assert_same(list(outputs), list(expected))
    names = {getattr(call.op, "__name__", str(call.op)) for call in tape.calls}
    assert any("mm" in name for name in names) and "kernel" in names, names
    assert not any(call.op is region for call in tape.calls)


def test_the_cpu_engine_calls_a_wrapper_that_it_does_not_know_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_HARMLESS", inductor._HARMLESS - {"extern_kernels"})
    twins = net_twins("cpu")
    for _ in range(3):
        twins.both(step(sample("cpu")), exact=False)
    twins.assert_replayed(3)
    tape = cpu._Tape()
    _, region, inputs = compiled_of("cpu")
    with kernels_only():
        cpu._record_compiled(region, tape, inputs)
    assert [call.op for call in tape.calls] == [region]


class Memory:
    """Stands for a region's own memory: which allocations are made in it?"""

    def __init__(self) -> None:
        self.entered = False

    def enter(self) -> None:
        self.entered = True

    def leave(self) -> None:
        self.entered = False


def test_the_cuda_engine_tells_allocations_of_outputs_from_scratch(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, region, inputs = compiled_of(device)
    memory, own, scratch = Memory(), [], []
    real = cuda._Allocations._make

    def make(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, function, *args, **kwargs)
        if isinstance(result, torch.Tensor) and "empty" in str(function):
            (own if memory.entered else scratch).append(result.untyped_storage())
        return result

    with kernels_only():
        run = cuda._rehearsed(region, inputs)
        monkeypatch.setattr(cuda._Allocations, "_make", make)
        outputs = run(memory, inputs)  # type: ignore[arg-type]  # a stand-in
    leaving = {tensor.untyped_storage()._cdata for tensor in outputs}
    assert own and {storage._cdata for storage in own} <= leaving
    assert scratch and not {storage._cdata for storage in scratch} & leaving


def test_all_memory_is_the_regions_own_where_the_wrapper_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    _, region, inputs = compiled_of("cpu")
    monkeypatch.setattr(inductor.CompiledGraph, "hooked", lambda self, *how: None)
    memory = Memory()
    with kernels_only():
        outputs = cuda._rehearsed(region, inputs)(memory, inputs)  # type: ignore[arg-type]  # a stand-in
        assert memory.entered
        assert_same(list(outputs), list(region(*inputs)))


def test_outputs_that_inductor_lets_share_memory_get_their_own() -> None:
    x = torch.randn(3)

    def code(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        made = inputs[0] * 2
        return made, made, inputs[0], made.view(3, 1)

    region = inductor.CompiledGraph(code, 1, ("x", "a", "b", "c", "a"), frozenset({0, 3}), backward=False)
    first, second, third, view = region(x)
    assert_same([first, second, third, view], [x * 2, x * 2, x, (x * 2).view(3, 1)])
    storages = [tensor.untyped_storage().data_ptr() for tensor in (first, second, third, view, x)]
    assert len(set(storages)) == 4 and storages[0] == storages[3]
    apart = inductor.CompiledGraph(lambda inputs: (x * 2, x * 2), 0, ("a", "a"), frozenset({0, 1}), backward=False)
    with pytest.raises(inductor.CannotCompile, match="memory of its own"):
        apart()


def test_memory_goes_back(device: str) -> None:
    engine = engines.get(device)
    pool = engine.new_pool(torch.empty(0, device=device).device)
    capture, region, inputs = compiled_of(device)
    captured = engine.capture(pool, region, inputs, 1)
    assert captured.outputs and pool.bytes_held() > 0
    captured.release()
    pool.trim()
    assert dataclasses.is_dataclass(capture.regions) and isinstance(capture.regions, compiling.Regions)


@pytest.mark.cuda
def test_on_cuda_outputs_lie_in_the_regions_own_pool_and_scratch_does_not() -> None:
    twins = net_twins("cuda")
    slot = capture_of(twins.graphed.module).slots[0]
    segments = torch.cuda.memory_snapshot()

    def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
        address = tensor.untyped_storage().data_ptr()
        (found,) = [s for s in segments if s["address"] <= address < s["address"] + s["total_size"]]
        return tuple(found["segment_pool_id"])

    for region, inputs in ((slot.forward, slot._arguments), (slot.backward, slot.backward_inputs())):
        assert isinstance(region, cuda.CudaRegion)
        given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        made = [out for out in region.outputs if out.untyped_storage().data_ptr() not in given]
        assert made and {pool_of(out) for out in made} == {tuple(region.own.handle)}
        # Once it goes back to the shared pool in any case, at the end.
        assert region.own._uses[region.own._shared] > 1, "the whole region ran in memory of its own"
