"""Faults that the state machine (``test_stateful.py``) has found, each reduced to a few lines."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxgraph
from fxgraph._torch_compat.attention import has_seed, seeds


def test_a_copy_whose_samples_do_not_fit_any_more(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(nn.Linear(4, 2).to(device), (x,))
    graphed.double()
    copied = copy.deepcopy(graphed)
    torch.testing.assert_close(copied(x.double()), fxgraph.ungraph(graphed)(x.double()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*max_in_flight:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("outstanding", [0, 1, 2])
def test_checkpoint_past_max_in_flight(max_in_flight: int, outstanding: int, device: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": max_in_flight})
    for module in (eager, graphed):
        held = [module(x) for _ in range(outstanding)]
        checkpoint(module, x, use_reentrant=False).square().sum().backward()
        for out in held:
            out.sum().backward()
    for mine, its in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*max_in_flight:fxgraph.EagerFallbackWarning")
def test_a_replay_of_batch_norm_counts_no_version_that_eager_does_not(device: str) -> None:
    eager = nn.BatchNorm1d(4).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": 1})
    results = []
    for module in (eager, graphed):
        before = [buffer._version for buffer in module.buffers()]  # a copy's need not be 0
        waiting = module(x)
        ran_eagerly = module(x)  # graphed: the one slot waits for its backward
        of_another_shape = module(x[:2])
        grads = [
            torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
            for out in (ran_eagerly, waiting, of_another_shape)
        ]
        results.append((grads, [b._version - old for b, old in zip(module.buffers(), before, strict=True)]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bad = nn.BatchNorm1d(4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.bad:
            raise ValueError("the user's own")
        return y


def test_the_first_call_of_a_copy_raises_as_in_eager(device: str) -> None:
    eager = Raises().to(device)
    x = torch.randn(3, 4, device=device)
    copied = copy.deepcopy(fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,)))
    for module in (eager, copied):
        module.bad = True
        with pytest.raises(ValueError, match="the user's own"):
            module(x)
    torch.testing.assert_close(list(copied.buffers()), list(eager.buffers()), rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x + self.layer(x).tanh()
        return {"y": hidden + self.layer(hidden).tanh(), "hidden": hidden * 2.0}


@pytest.mark.parametrize("names", [["y"], ["hidden"], ["y", "hidden"]])
def test_a_backward_of_some_outputs_of_tied_layers(names: list[str], device: str) -> None:
    eager = Tied().to(device)
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,))
    for module in (eager, graphed):
        out = module(x)
        sum(out[name].square().sum() for name in names).backward()
    for mine, its in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


def test_gradients_that_do_not_need_a_parameter_that_was_changed(device: str) -> None:
    eager = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,))
    for module in (eager, graphed):
        loss = module(x).square().sum()
        with torch.no_grad():
            module[0].weight.mul_(2)  # what flows to the last layer's parameters does not pass through it
        torch.autograd.grad(loss, list(module[1].parameters()), retain_graph=True)
        for wanted in (x, module[0].bias):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, wanted, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


VIEWS_OF_A_STORAGE = {
    "all": (lambda base: base, 1),
    "from the second row": (lambda base: base[1:], 0),
    "every second column": (lambda base: base[:, ::2], 0),
    "the first rows": (lambda base: base[:2], 0),
}


@pytest.mark.filterwarnings("ignore:.*as_strided reads the memory around:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("name", VIEWS_OF_A_STORAGE, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("function", [torch.as_strided, torch.as_strided_copy])
def test_as_strided_of_an_input_that_is_part_of_a_storage(name: str, function: Any, device: str) -> None:
    view, replays = VIEWS_OF_A_STORAGE[name]
    x = view(torch.randn(4, 6, device=device))
    graphed = fxgraph.make_graphed_callables(lambda x: function(x, (2, 2), (1, 2), 0) * 2, (x,))
    x = view(torch.randn(4, 6, device=device))
    torch.testing.assert_close(graphed(x), function(x, (2, 2), (1, 2), 0) * 2, rtol=0, atol=0)
    assert fxgraph.stats(graphed).replays == replays


def test_outputs_with_gaps_that_are_held_keep_their_strides(device: str) -> None:
    a = torch.empty_strided((10, 10), (20, 2), device=device).normal_().requires_grad_()
    b = torch.randn(10, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(lambda a, b: torch.diagonal_scatter(a, b), (a, b))
    expected = torch.diagonal_scatter(a, b)
    for held in [graphed(a, b) for _ in range(4)]:
        torch.testing.assert_close(held, expected, rtol=0, atol=0, check_stride=True)


FILLS = {
    "normal_": (), "uniform_": (), "exponential_": (), "cauchy_": (), "log_normal_": (),
    "geometric_": (0.3,), "bernoulli_": (0.3,),
}  # fmt: skip
LAYOUTS = {
    "gaps": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(1, -1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
}


@pytest.mark.filterwarnings("ignore:.*fills a tensor that:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("given", [True, False])
def test_random_fills_of_tensors_in_other_layouts(fill: str, layout: str, given: bool, device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(x if given else x * 1, fill)(*FILLS[fill])

    make = LAYOUTS[layout]
    graphed = fxgraph.make_graphed_callables(function, (make(torch.zeros(2, 3, 4, 8, device=device)),))
    results = []
    for each in (function, graphed):
        torch.manual_seed(3)
        results.append(each(make(torch.zeros(2, 3, 4, 8, device=device))).clone())
    assert torch.equal(*results)


class UsedTwice(nn.Module):
    """``inside`` switches autocast on in the forward itself."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self.inside = inside
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            with torch.autocast(self.inside, dtype=torch.bfloat16):
                return self._run(x)
        return self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.norm(self.layer(x).tanh()) + x @ self.layer.weight.softmax(0)
        return x


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("leaf", [True, False])
def test_weights_that_are_used_several_times_under_autocast(inside: bool, leaf: bool, device: str) -> None:
    eager = UsedTwice(device if inside else "").to(device)
    sample = torch.randn(5, 4, device=device, requires_grad=leaf)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not inside):
        graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (sample,))
    x = torch.randn(5, 4, device=device, requires_grad=leaf)
    results = []
    for module in (eager, graphed):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not inside):
            out = module(x if leaf else x * 2)
        out.float().square().sum().backward()
        results.append([out.detach(), x.grad, *[p.grad for p in module.parameters()]])
        x.grad = None
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert fxgraph.stats(graphed).eager_calls == 0


def _attention_with_mask(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its mask is learnt, so the kernels of the composite op are float32's, between casts."""
    q = (x @ w).unflatten(-1, (2, -1)).transpose(1, 2)
    bias = w[: x.shape[1], : x.shape[1]].to(q.dtype)
    return F.scaled_dot_product_attention(q, q.tanh(), q.sin(), attn_mask=bias)


def _attention_with_dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.tanh(), q.sin(), dropout_p=0.2)


def _float32_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = x @ w
    return y.tanh() @ w


@pytest.mark.parametrize("function", [_attention_with_mask, _attention_with_dropout, _float32_inside])
def test_the_backward_of_what_autocast_leaves_in_float32(function: Any, device: str) -> None:
    """AOTAutograd traces a backward with the autocast of the forward, unless it is told: eager's has none."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 5, 8, device=device), torch.randn(8, 8, device=device)
    results = []
    for graph in (False, True):
        inputs = [t.clone().requires_grad_() for t in (x, w)]
        with torch.autocast(device, dtype=torch.bfloat16):
            call = function
            if graph:
                sample = tuple(t.detach().clone().requires_grad_() for t in inputs)
                call = fxgraph.make_graphed_callables(function, sample)
            torch.manual_seed(1)
            out = call(*inputs)
        out.float().square().sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_gradient_that_torch_keeps_without_memory(device: str) -> None:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(torch.sgn, (x,))
    (grad,) = torch.autograd.grad(graphed(x).square().sum(), x)
    assert torch.equal(grad, torch.zeros_like(x))
    assert fxgraph.stats(graphed).replays == 1


@pytest.mark.filterwarnings("ignore:.*ZeroDivisionError:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:Error detected in MseLossBackward0:UserWarning")  # of the failing trace
def test_a_decomposition_that_divides_by_the_number_of_elements(device: str) -> None:
    x = torch.randn(0, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(nn.functional.mse_loss, (x, torch.randn(0, device=device)))
    assert graphed(x, torch.randn(0, device=device)).isnan()


@pytest.mark.parametrize("name", ["hook", "retain_grad", "grad of one with respect to the other", "second order"])
def test_an_output_that_feeds_another_one(name: str, device: str) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = (x @ w).tanh()
        second = (first @ w).tanh()
        return first, second, second.square().sum()

    x = torch.randn(3, 4, device=device)
    w = torch.randn(4, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(layers, (x, w))
    results = []
    for function in (layers, graphed):
        w.grad = None
        first, second, loss = function(x, w)
        seen: list[Any] = []
        if name == "hook":
            for out in (first, second, loss):
                out.register_hook(lambda grad, seen=seen: seen.append(grad) or grad * 2)
            loss.backward()
        elif name == "retain_grad":
            first.retain_grad(), second.retain_grad()
            (loss + first.sum()).backward()
            seen += [first.grad, second.grad]
        elif name == "second order":
            (grad,) = torch.autograd.grad(loss, second, create_graph=True)
            seen += [*torch.autograd.grad(grad.square().sum(), [first, w])]
        else:
            seen += [*torch.autograd.grad(loss, [first, second, w], retain_graph=True)]
            seen += [*torch.autograd.grad(second.sum(), [first, w])]
        results.append((seen, w.grad))
    torch.testing.assert_close(results[1], results[0])
    assert fxgraph.stats(graphed).eager_calls == 0


TAKEN_APART = {
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=0.3),
    "addcdiv_": lambda a, b, c: a.clone().addcdiv_(b, c, value=0.3),
    "addcmul_": lambda a, b, c: a.clone().addcmul_(b, c, value=0.3),
    "add_": lambda a, b, c: a.clone().add_(b, alpha=0.3),
    "_foreach_lerp_": lambda a, b, c: [torch._foreach_lerp_([d := a.clone()], [b], 0.3), d][1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["make_graphed_callables", "compile"])
@pytest.mark.parametrize("name", TAKEN_APART)
def test_an_op_that_dynamo_takes_apart_rounds_as_in_eager(
    name: str, compiled: bool, dtype: torch.dtype, device: str
) -> None:
    function = TAKEN_APART[name]
    inputs = tuple(torch.randn(1000, device=device, dtype=dtype) for _ in range(3))
    if compiled:
        graphed = torch.compile(function, backend="graphed")
    else:
        graphed = fxgraph.make_graphed_callables(function, inputs)
    for _ in range(2):
        torch.testing.assert_close(graphed(*inputs), function(*inputs), rtol=0, atol=0)
    assert fxgraph.stats(None if compiled else graphed).eager_calls == 0


def test_what_dynamo_takes_apart_for_other_backends_is_left_alone(device: str) -> None:
    a, b, c = (torch.randn(4, device=device) for _ in range(3))
    function = TAKEN_APART["addcdiv"]
    torch.compile(function, backend="graphed")(a, b, c)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    torch.compile(function, backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(a, b, c)
    assert not graphs[0].graph.find_nodes(op="call_function", target=torch.addcdiv)


@pytest.mark.filterwarnings("ignore:.*(captured in parts|runs eagerly):fxgraph.EagerFallbackWarning")
def test_an_expanded_sample_on_which_only_tracing_fails(device: str) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x.baddbmm_(a, b, beta=0)
        return x + 1

    # The four products are the same: which of them is written last is open on a GPU.
    a, b = torch.randn(1, 2, 5, device=device).expand(4, 2, 5), torch.randn(1, 5, 3, device=device).expand(4, 5, 3)
    expected, found, sample = (torch.ones(1, 2, 3, device=device).expand(4, 2, 3) for _ in range(3))
    graphed = fxgraph.make_graphed_callables(function, (sample, a, b))
    assert torch.equal(sample, torch.ones_like(sample))
    assert torch.equal(graphed(found, a, b), function(expected, a, b))
    assert torch.equal(found, expected)
    assert fxgraph.stats(graphed).eager_calls == 1


def test_a_single_element_with_any_strides(device: str) -> None:
    x = torch.empty_strided((1, 1), (7, 5), device=device).normal_().requires_grad_()
    graphed = fxgraph.make_graphed_callables(lambda x: torch.flip(x, [0]), (x,))
    graphed(x).sum().backward()
    assert torch.equal(graphed(x), x)
    assert x.grad == 1
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly:fxgraph.EagerFallbackWarning")
def test_an_op_that_fails_leaves_no_error_in_the_log(device: str, caplog: pytest.LogCaptureFixture) -> None:
    graphed = fxgraph.make_graphed_callables(nn.Linear(3, 4).to(device), (torch.randn(2, 3, device=device),))
    with pytest.raises(fxgraph.TraceError):
        graphed(torch.randn(2, 7, device=device))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("grad", [True, False])
def test_two_outputs_in_one_memory_stay_in_one_when_results_are_held(grad: bool, device: str) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x * 2
        return v.contiguous(), v

    x = torch.randn(3, device=device, requires_grad=grad)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    for held in [graphed(x) for _ in range(4)]:
        one, other = held
        assert torch.equal(one, x * 2)
        with torch.no_grad():
            one.add_(1)
        assert torch.equal(other, x * 2 + 1)


@pytest.mark.parametrize("draw", [torch.dropout, torch.native_dropout])
def test_a_random_op_whose_result_nobody_uses(draw: Any, device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        v = (x * 2).normal_()
        draw(v, 0.5, True)
        return v

    x = torch.randn(3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    results = []
    for each in (function, graphed):
        torch.manual_seed(0)
        out = each(x)
        results.append((out.detach(), torch.autograd.grad(out.sum(), x)[0], torch.rand(1, device=device)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_parameter_unfrozen_before_a_second_derivative(device: str) -> None:
    """Eager's graph of the first derivative reaches it where an op has saved it, but not through what was computed."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    module[0].weight.requires_grad_(False)
    x = torch.randn(5, 3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(module, (x,))
    loss = graphed(x).square().sum()
    module[0].weight.requires_grad_(True)
    with pytest.raises(fxgraph.DoubleBackwardError, match=r"double-backward-input-changed[^$]*weight"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss = graphed(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.autograd.grad(first.sum(), module[0].weight)[0].abs().sum() > 0


def test_a_parameter_frozen_before_a_second_derivative(device: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    x = torch.randn(5, 3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(module), (x,))
    results = []
    for each in (module, graphed):
        out = each(x)
        each[0].weight.requires_grad_(False)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append([grad.detach(), x.grad, *[p.grad for p in each.parameters()]])
        x.grad = None
    for found, expected in zip(results[1], results[0], strict=True):
        # Sums of second derivatives come in another order: the forward runs again by itself.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert results[0][2] is None, "frozen"


def test_a_weight_changed_before_its_own_gradient_is_asked_for(device: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device)
    x = torch.randn(5, 3, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(module), (x,))
    for each in (module, graphed):
        loss = each(x).sum()
        with torch.no_grad():
            each[0].weight.add_(1)  # nobody has saved it: x needs no gradient
        torch.autograd.grad(loss, each[0].weight, retain_graph=True)
        with torch.no_grad():
            each[1].weight.add_(1)
        # Its gradient does not depend on it, but it lies with what the same node has saved.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, each[1].weight)


LAYOUTS_OF_GRADIENTS = {
    "contiguous": lambda y: (y * torch.arange(float(y.numel()), device=y.device).view(y.shape)).sum(),
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: (
        y.transpose(1, -1) * torch.arange(float(y.numel()), device=y.device).view(y.transpose(1, -1).shape)
    ).sum(),
    "expanded in one dimension": lambda y: (y.sum(0) * torch.arange(float(y[0].numel()), device=y.device).view(
        y[0].shape)).sum(),
    "channels last": lambda y: y.to(memory_format=torch.channels_last).square().sum() if y.dim() == 4 else y.sum(),
}  # fmt: skip


@pytest.mark.parametrize("loss", LAYOUTS_OF_GRADIENTS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_group_norm_takes_gradients_in_any_layout(loss: str, memory_format: Any, device: str) -> None:
    module = nn.GroupNorm(2, 8).to(device)
    x = torch.randn(2, 8, 3, 5, device=device).contiguous(memory_format=memory_format).requires_grad_()
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(module), (x,))
    for _ in range(3):  # op by op, then captured for the layout
        results = []
        for each in (module, graphed):
            results.append(torch.autograd.grad(LAYOUTS_OF_GRADIENTS[loss](each(x)), [x, *each.parameters()]))
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected)


def test_gradients_in_more_layouts_than_are_captured(device: str) -> None:
    # In float64: other layouts may take other kernels.
    module = nn.Linear(4, 4).to(device, torch.float64)
    x = torch.randn(3, 5, 4, device=device, dtype=torch.float64)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(module), (x,))
    for name in [*LAYOUTS_OF_GRADIENTS, *LAYOUTS_OF_GRADIENTS, "expanded", "contiguous", "transposed", "expanded"]:
        results = [
            torch.autograd.grad(LAYOUTS_OF_GRADIENTS[name](each(x)), list(each.parameters()))
            for each in (module, graphed)
        ]
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected)


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        return grad.as_strided((grad.numel(),), (1,)).flip(0).view(grad.shape) * 2


@pytest.mark.filterwarnings("ignore:.*Function:fxgraph.EagerFallbackWarning")  # torch < 2.13 runs it eagerly
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("loss", LAYOUTS_OF_GRADIENTS)
@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_a_backward_of_the_users_that_makes_its_gradient_contiguous(loss: str, kernels: str, device: str) -> None:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(lambda x: Flipped.apply(x) * 3, (x,), options={"kernels": kernels})
    for _ in range(3):
        results = [
            torch.autograd.grad(LAYOUTS_OF_GRADIENTS[loss](each(x)), x)[0]
            for each in (lambda x: Flipped.apply(x) * 3, graphed)
        ]
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


SCALE, SHIFT, LAST = torch.ones(3), torch.zeros(3), None


def scaled_by_globals(x: torch.Tensor, shift: torch.Tensor = SHIFT) -> torch.Tensor:
    global LAST
    LAST = x * 2
    return x * SCALE + shift


def test_globals_and_default_arguments_are_read_and_written_at_each_call(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, device=device)
    names = scaled_by_globals.__globals__
    monkeypatch.setitem(names, "SCALE", torch.ones(3, device=device))
    monkeypatch.setattr(scaled_by_globals, "__defaults__", (torch.zeros(3, device=device),))
    graphed = fxgraph.make_graphed_callables(scaled_by_globals, (x,))
    for scale, shift in [(2.0, 0.0), (3.0, 0.0), (3.0, 1.0), (2.0, 4.0)]:
        monkeypatch.setitem(names, "SCALE", torch.full((3,), scale, device=device))
        monkeypatch.setattr(scaled_by_globals, "__defaults__", (torch.full((3,), shift, device=device),))
        x = torch.randn(2, 3, device=device)
        monkeypatch.setitem(names, "LAST", None)
        assert torch.equal(graphed(x), x * scale + shift)
        assert torch.equal(names["LAST"], x * 2)
    before = len(names)
    del graphed
    gc.collect()
    assert len(names) < before, "what the graphed function needed among them is gone with it"


def test_an_assertion_on_a_tensor_is_the_users_own(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        assert y.isfinite().all(), "not finite"
        return y.exp()

    x = torch.ones(3, device=device)
    with pytest.warns(fxgraph.EagerFallbackWarning, match="in parts"):
        graphed = fxgraph.make_graphed_callables(function, (x,))
    compiled = torch.compile(function, backend="graphed")
    for each in (graphed, compiled):
        assert torch.equal(each(x), function(x))
        with pytest.raises(AssertionError, match="not finite"):
            each(x / 0)
        assert torch.equal(each(x), function(x))


# On a GPU it would end the use of the device, as in eager.
@pytest.mark.parametrize("kernels", ["aten", "inductor"])
def test_an_assertion_in_the_graph_is_replayed(kernels: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.isfinite().all(), "not finite")
        return x.exp()

    graphed = fxgraph.make_graphed_callables(function, (torch.ones(3),), options={"kernels": kernels})
    for each in (function, graphed):
        each(torch.zeros(3))
        with pytest.raises(RuntimeError, match="not finite"):
            each(torch.full((3,), torch.inf))
    assert torch.equal(graphed(torch.zeros(3)), torch.ones(3))
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly.*capture:fxgraph.EagerFallbackWarning")
def test_a_failing_op_is_caught_as_in_eager_too() -> None:  # on a GPU an index out of range ends the use of the device
    table = nn.Embedding(5, 4)
    with pytest.raises(fxgraph.TraceError) as caught:
        fxgraph.make_graphed_callables(copy.deepcopy(table), (torch.tensor([7]),))
    assert isinstance(caught.value, IndexError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is fxgraph.TraceError and str(again) == str(caught.value)
    graphed = fxgraph.make_graphed_callables(table, (torch.tensor([0, 3]),))
    for indices in ([5, 1], [5, 1, 2], [5, 1, 2], [5, 1, 2]):
        with pytest.raises(IndexError):
            graphed(torch.tensor(indices))
    assert torch.equal(graphed(torch.tensor([0, 3])), table(torch.tensor([0, 3])))


WRITES = {
    "baddbmm_": lambda x, a: x.mT.baddbmm_(a, a.mT),
    "index_add_": lambda x, a: x.mT.index_add_(0, torch.zeros(2, dtype=torch.long, device=x.device), a[:2]),
    "scatter_": lambda x, a: x.mT.scatter_(0, torch.zeros_like(a, dtype=torch.long), a),
    "cumsum_": lambda x, a: x.mT.cumsum_(1),
    "tril_": lambda x, a: x.mT.tril_(),
    "a view": lambda x, a: x[0].mT.tril_(),
    "a slice": lambda x, a: x.mT[:, :2].tril_(),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_keeps_its_strides(name: str, grad: bool, device: str) -> None:
    def function(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copy = x.clone()
        WRITES[name](copy, a)
        return copy.sin(), copy.mT + x.mT

    for dense in (True, False):
        x = torch.randn(3, 3, 3, device=device).mT
        x = (x if dense else torch.stack([x, x], -1)[..., 0]).requires_grad_(grad)
        a = torch.randn(3, 3, 3, device=device)
        graphed = fxgraph.make_graphed_callables(function, (x, a))
        expected, found = function(x, a), graphed(x, a)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, check_stride=True)
        if grad:
            gradients = [torch.autograd.grad([o.square().sum() for o in outputs], x) for outputs in (expected, found)]
            torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
        assert fxgraph.stats(graphed).eager_calls == 0


PRODUCTS = {
    "all": lambda x: x.prod(),
    "a dimension": lambda x: torch.prod(x, -1),
    "keepdim": lambda x: torch.prod(x, 0, keepdim=True),
    "dtype": lambda x: x.prod(1, dtype=torch.complex128 if x.is_complex() else torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_a_product_follows_the_zeros_in_each_call(name: str, dtype: torch.dtype, device: str) -> None:
    function = PRODUCTS[name]
    sample = torch.randn(7, 9, device=device, dtype=dtype, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (sample,))
    for zeros in (0, 1, 2, 0):
        x = torch.randn(7, 9, device=device, dtype=dtype)
        x.view(-1)[:zeros] = 0
        x.requires_grad_()
        expected, found = function(x), graphed(x)
        tangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(output, x, tangent)[0] for output in (expected, found)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0, equal_nan=True)
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.parametrize("kind", ["held", "partial"])
def test_the_backward_of_attention_with_dropout_that_no_graph_holds(kind: str, device: str) -> None:
    """On CUDA float32 takes the memory-efficient kernel, whose seed a captured forward leaves on the device."""

    def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = x.view(3, 2, 4, 16, 16)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), x.sin()

    xs = [torch.randn(3, 2, 4, 16, 16, device=device, requires_grad=True) for _ in range(3)]
    graphed = fxgraph.make_graphed_callables(attend, (xs[0],))
    seen = []
    for function in (attend, graphed):
        torch.manual_seed(1)
        seen.append([])
        for x in xs:
            outputs = function(x)
            used = outputs if kind == "held" else outputs[:1]
            seen[-1].append(torch.autograd.grad([out.square().sum() for out in used], x)[0])
    torch.testing.assert_close(seen[1], seen[0])  # the kernel's sums may come in another order
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.parametrize("op", ["_scaled_dot_product_efficient_attention", "_efficient_attention_forward"])
def test_which_results_of_a_forward_are_seeds(op: str) -> None:
    graph = torch.fx.Graph()
    both = graph.call_function(getattr(torch.ops.aten, op).default, (graph.placeholder("q"),))
    results = [graph.call_function(operator.getitem, (both, i)) for i in range(4)]
    assert not has_seed(results[:2]) and not has_seed([both, None, 1])
    assert has_seed(results[:3]) and has_seed(results[3:])


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:.*seed of attention's dropout:fxgraph.EagerFallbackWarning")
def test_attention_whose_seed_is_returned_is_eagers() -> None:
    def f(q: torch.Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0)

    q = torch.randn(2, 2, 16, 8, device="cuda", requires_grad=True)
    graphed = fxgraph.make_graphed_callables(f, (q,))
    for mine, its in zip(graphed(q), f(q), strict=True):
        assert mine.device == its.device


@pytest.mark.parametrize("name", ["_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"])
def test_which_inputs_of_a_backward_are_seeds(name: str) -> None:
    target = getattr(torch.ops.aten, name).default
    graph = torch.fx.Graph()
    inputs = {a.name: graph.placeholder(a.name) for a in target._schema.arguments if not a.kwarg_only}
    graph.output(graph.call_function(target, tuple(inputs.values())))
    found = seeds(torch.fx.GraphModule({}, graph))
    assert [list(inputs)[k] for k in found] == ["philox_seed", "philox_offset"]


CUMULATIVE_PRODUCTS = {
    "first": lambda x: x.cumprod(0),
    "last": lambda x: torch.cumprod(x, -1),
    "in place": lambda x: x.clone().cumprod_(1),
    "of columns": lambda x: x.t().cumprod(1),
    "then prod": lambda x: x.cumprod(1).prod(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", CUMULATIVE_PRODUCTS)
def test_the_gradient_of_a_cumulative_product_follows_the_zeros_in_each_call(
    name: str, dtype: torch.dtype, device: str
) -> None:
    function = CUMULATIVE_PRODUCTS[name]
    sample = torch.randn(7, 9, device=device, dtype=dtype, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (sample,))
    for zeros in ((), (0,), (4,), (4, 6, 13), (8, 62), (4, 4 + 9, 4 + 18, 40), ()):
        x = torch.randn(7, 9, device=device, dtype=dtype)
        x.view(-1)[list(zeros)] = 0
        x.requires_grad_()
        expected, found = function(x), graphed(x)
        tangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(output, x, tangent)[0] for output in (expected, found)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        # With zeros eager divides in place, which on the CPU rounds complex numbers otherwise than a division does.
        exact = not (zeros and dtype.is_complex and device == "cpu")
        tolerances = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(gradients[1], gradients[0], **tolerances, equal_nan=True)
    assert fxgraph.stats(graphed).eager_calls == 0


def test_the_gradient_of_a_cumulative_product_in_another_dtype(device: str) -> None:
    x = torch.randn(4, 5, device=device, requires_grad=True)
    function = lambda x: x.cumprod(1, dtype=torch.float64)  # noqa: E731
    graphed = fxgraph.make_graphed_callables(function, (x,))
    tangent = torch.randn(4, 5, device=device, dtype=torch.float64)
    gradients = [torch.autograd.grad(f(x), x, tangent)[0] for f in (function, graphed)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_the_gradient_of_a_product_of_one_number(device: str) -> None:
    x = torch.tensor(3.0, device=device, requires_grad=True)
    for function in (lambda x: x.prod(), lambda x: x.prod(0), lambda x: x.prod(0, keepdim=True)):
        graphed = fxgraph.make_graphed_callables(function, (x,))
        (gradient,) = torch.autograd.grad(graphed(x), x, torch.tensor(2.0, device=device))
        assert gradient == 2
        assert fxgraph.stats(graphed).eager_calls == 0


def test_a_product_inside_of_torch_func(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows = torch.func.vmap(torch.func.grad(lambda row: row.sin().prod()))(x)
        return rows + torch.func.vmap(torch.prod)(x).unsqueeze(1)

    x = torch.randn(4, 3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    torch.testing.assert_close(graphed(x), function(x))
    gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (function, graphed)]
    torch.testing.assert_close(gradients[1], gradients[0])
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:.*runs eagerly:fxgraph.EagerFallbackWarning")
def test_a_mask_that_is_larger_than_what_it_selects_from(device: str) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(x.sin() * 2, mask).cos() * 2

    x, mask = torch.randn(10, device=device), torch.ones(10, 10, dtype=torch.bool, device=device)
    graphed = fxgraph.make_graphed_callables(function, (x, mask))
    assert torch.equal(graphed(x, mask), function(x, mask))


@pytest.mark.filterwarnings("ignore:.*runs eagerly:fxgraph.EagerFallbackWarning")
def test_an_output_requires_grad_where_no_input_has_a_gradient(device: str) -> None:
    x = torch.randn(0, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(lambda x: torch.linalg.norm(x, 0), (x,), allow_unused_input=True)
    assert graphed(x).requires_grad


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # and looks
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("max_in_flight", [1, 8])
def test_a_second_derivative_of_a_function_of_the_users_is_right_or_refused(
    entry: str, max_in_flight: int, device: str
) -> None:
    """Dynamo reads its backward as one whose saved values are constants: the second derivative was wrong in silence."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return _Square.apply(x.sin())

    def second(function: Any) -> torch.Tensor:
        x = torch.tensor([0.3, 0.5, 0.7], device=device, requires_grad=True)
        pending = function(x)  # takes the one slot, so that the next call may run eagerly
        (first,) = torch.autograd.grad(function(x).exp().sum(), x, create_graph=True)
        first.square().sum().backward()
        del pending
        return x.grad

    options: dict[str, Any] = {"max_in_flight": max_in_flight}
    if entry == "torch.compile":
        graphed: Any = torch.compile(f, backend="graphed", options=options)
    else:
        graphed = fxgraph.make_graphed_callables(
            f, (torch.ones(3, device=device, requires_grad=True),), options=options
        )
    try:
        found = second(graphed)
    except fxgraph.DoubleBackwardError as error:
        assert error.id == "double-backward"
        assert "torch.autograd.Function" in str(error)
    else:
        assert torch.equal(found, second(f))


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].fill_(3.0)])
def test_a_leaf_is_not_changed_in_place_by_a_capture_made_with_another_tensor(
    change: Any, entry: str, device: str
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        change(x)
        return x * 2

    sample = torch.zeros(3, device=device)
    graphed = (
        torch.compile(f, backend="graphed")
        if entry == "torch.compile"
        else fxgraph.make_graphed_callables(f, (sample,))
    )
    graphed(torch.zeros(3, device=device, requires_grad=True) * 1)
    leaf = torch.zeros(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        graphed(leaf)
    assert torch.equal(leaf.detach(), torch.zeros(3, device=device))
    for function in (graphed, f):
        assert function(torch.zeros(3, device=device, requires_grad=True) * 1).grad_fn is not None


@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
def test_a_gradient_has_the_strides_that_batch_norm_gives_its_result(
    shape: tuple[int, ...], entry: str, device: str
) -> None:
    """Torch's fake tensors say that a transposed input gives a transposed result, which the CPU's kernels do not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x).clone()
            y[:, 1:].add_(y[:, :1])
            return y

    net = Net().to(device)
    nn.init.normal_(net.norm.weight)
    x = torch.randn(5, shape[0], *shape[2:], device=device).transpose(0, 1).detach().requires_grad_()
    nets = [copy.deepcopy(net), net]
    nets[1] = (
        torch.compile(net, backend="graphed") if entry == "torch.compile" else fxgraph.make_graphed_callables(net, (x,))
    )
    found = [torch.autograd.grad(one(x).square().mean(), [x, *one.parameters()]) for one in nets]
    for mine, its in zip(found[1], found[0], strict=True):
        assert mine.stride() == its.stride()
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_readings_leave_nothing_in_the_module_of_the_function() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    graphed = fxgraph.make_graphed_callables(module, (torch.randn(2, 4),), options={"max_captures": 1})
    names = set(vars(nn.modules.container))
    counts = []
    for rows in (3, 2, 3, 2, 3, 2):
        graphed(torch.randn(rows, 4))
        gc.collect()
        counts.append(len(set(vars(nn.modules.container)) - names))
    assert counts[-1] <= counts[1], "as many as one reading has"


@pytest.mark.filterwarnings("ignore:.*the capture failed:fxgraph.EagerFallbackWarning")
def test_an_op_that_fails_leaves_the_python_state_that_it_leaves_in_eager(device: str) -> None:
    """Fake tensors let another dtype through; eager has counted the call before the op fails."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen += 1
            return self.linear(x)

    x = torch.randn(5, 4, device=device)
    eager = Counting().to(device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,))
    for given in (x, x.double(), x, x.double(), x):
        for module in (eager, graphed):
            if given is x:
                module(given)
            else:
                with pytest.raises(RuntimeError, match="same dtype"):
                    module(given)
        assert (graphed.calls, graphed.seen.item()) == (eager.calls, eager.seen.item())
    assert fxgraph.stats(graphed).replays == 3
