"""Constants on the CPU in a callable that works on a GPU. Fake CUDA tensors stand for it; autograd needs a real one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxgraph
import passes
from fxgraph import plan, stages, trace
from fxgraph._torch_compat import dynamo
from fxgraph.options import Options
from fxgraph.program import Pools, Program
from passes.facts import value_of

aten = torch.ops.aten


def read(function: Callable[..., Any], config: dict[str, bool] | None = None) -> tuple[trace.PythonTrace, Any]:
    """The torch-level graph of a function of two fake CUDA matrices, and its flat inputs."""
    with FakeTensorMode():
        inputs = (torch.empty(4, 4, device="cuda"), torch.empty(4, 4, device="cuda"))
    traced = trace.read(function, inputs, {}, **(config or {}))
    return traced, traced.flat_inputs(inputs, {})


def exported(function: Callable[..., Any]) -> trace.JointGraph:
    traced, inputs = read(function)
    assert traced.graph is not None
    assert trace.check_torch_level(traced.graph).ok
    return trace.export(traced.graph, traced.specs, inputs)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w) / torch.sqrt(torch.tensor(64.0))
    y = torch.tensor(2.0) * y + torch.full((4,), 3.0).to(x.device)
    y = torch.where(y > torch.tensor(0.5), y, torch.full((), -1.0))
    return y.masked_fill(y < 0, torch.tensor(torch.finfo(y.dtype).min))


def drawn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() * torch.rand(())


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() * torch.ones(()).add_(1)


def test_a_graph_with_constants_is_captured_whole() -> None:
    joint = exported(scaled)
    assert passes.check(joint.gm).ok
    called = [node.target for node in plan.make(joint).forward.graph.nodes if node.op == "call_function"]
    assert called == [
        *(aten.mm.default, aten.div.Tensor, aten.mul.Tensor, aten.full.default, aten.add.Tensor, aten.gt.Scalar),
        *(aten.full.default, aten.where.self, aten.lt.Scalar, aten.masked_fill.Scalar),
    ]


@pytest.mark.parametrize("function", [drawn, written])
def test_what_is_no_constant_is_named(function: Callable[..., Any]) -> None:
    traced, _ = read(function)
    assert traced.graph is not None
    assert trace.check_torch_level(traced.graph).ids == ("several-devices",)


def filled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).masked_fill(x > 0, w.sum())


def filled_with_drawn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).masked_fill(x > 0, torch.rand(()))


@pytest.mark.parametrize(("function", "rule"), [(filled, "host-sync"), (filled_with_drawn, "several-devices")])
def test_a_number_that_is_read_from_a_tensor_which_is_no_constant_is_named(
    function: Callable[..., Any], rule: str
) -> None:
    traced, _ = read(function)
    assert traced.graph is not None
    assert set(trace.check_torch_level(traced.graph).ids) == {rule}


def test_an_input_on_the_cpu_is_named() -> None:
    with FakeTensorMode():
        inputs = (torch.empty(4, device="cuda"), torch.empty(()))
    traced = trace.read(lambda x, y: x * (y + torch.tensor(1.0)), inputs, {})
    assert traced.graph is not None
    assert trace.check_torch_level(traced.graph).ids == ("several-devices",)


def test_what_cannot_be_moved_is_refused_in_the_joint_graph() -> None:
    joint = exported(lambda x, w: (x @ w).sin() * torch.full((), 2.5, dtype=torch.float64).view(1)[0] ** x)
    assert set(passes.check(joint.gm).ids) == {"several-devices"}


def test_constants_stay_beside_what_reads_them_where_a_graph_is_cut() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        factor = torch.sqrt(torch.tensor(64.0))
        y = (x @ w / factor).sin()
        y = y + torch.bincount(y.view(-1).long(), minlength=4).sum()
        return (y / factor).cos() * factor

    traced, _ = read(function, dynamo.DATA_IN_GRAPH)
    assert traced.graph is not None
    nodes = len(traced.graph.graph.nodes)
    judged = stages.Judged.of(traced.graph, Options())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        built = stages.build(judged, traced.specs, Options(), "it", Pools())
    assert isinstance(built, stages.Stages)
    assert len(traced.graph.graph.nodes) == nodes  # which others hold
    first, between, last = built.stages
    assert isinstance(first, Program)
    assert isinstance(last, Program)
    assert isinstance(between, stages.EagerStage)
    for part in (first, last):
        assert all(value_of(node).is_cuda for node in part.graph.graph.find_nodes(op="placeholder"))
        assert part.graph.graph.find_nodes(op="call_function", target=torch.sqrt)
        assert trace.check_torch_level(part.graph).ok


# -- what only the joint graph shows ----------------------------------------------------------------------------------


@torch.library.custom_op("fxgraph_tests::on_the_host_inside", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def on_the_host_inside(x: torch.Tensor) -> torch.Tensor:
    return (x.detach().cpu() * 2).to(x.device)


on_the_host_inside.register_fake(torch.empty_like)
on_the_host_inside.register_autograd(lambda ctx, grad: grad * 2)
torch.library.define("fxgraph_tests::composite", "(Tensor x) -> Tensor")


@torch.library.impl("fxgraph_tests::composite", "CompositeImplicitAutograd")
def composite(x: torch.Tensor) -> torch.Tensor:
    """An op that is written in terms of others, one of which no graph can hold."""
    return torch.ops.fxgraph_tests.on_the_host_inside(x + 1)


torch.library.define("fxgraph_tests::inverted", "(Tensor x) -> Tensor")


@torch.library.impl("fxgraph_tests::inverted", "CompositeImplicitAutograd")
def inverted(x: torch.Tensor) -> torch.Tensor:
    """With torch 2.13 the check that ``inv`` makes has an effect, for which the joint graph has an input of its own."""
    return aten.linalg_inv(x + 3 * torch.eye(4, device=x.device))


def with_a_composite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.ops.fxgraph_tests.composite((x @ w).sin())
    return y.cos() * 2


def matrices(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, device=device), torch.randn(4, 4, device=device, requires_grad=True)


@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
def test_an_op_inside_of_an_op_is_captured_around(entry: str, device: str) -> None:
    inputs = matrices(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxgraph.EagerFallbackWarning)
        if entry == "torch.compile":
            torch._dynamo.reset()
            graphed: Any = torch.compile(with_a_composite, backend="graphed")
        else:
            graphed = fxgraph.make_graphed_callables(with_a_composite, inputs)
        out = graphed(*inputs)
    said = [str(w.message) for w in caught if w.category is fxgraph.EagerFallbackWarning]
    assert len(said) == 1
    assert "captured in parts: [cudagraph-unsafe-op]" in said[0]
    expected = with_a_composite(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    (mine,), (its,) = (torch.autograd.grad(result.sum(), inputs[1]) for result in (out, expected))
    torch.testing.assert_close(mine, its, rtol=0, atol=0)
    if entry == "make_graphed_callables":
        assert len(fxgraph.stats(graphed).captures) == 2


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
def test_an_op_with_an_effect_is_captured_around_or_captured(device: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxgraph_tests.inverted((x @ w).sin()).cos() * 2

    inputs = matrices(device)
    graphed = fxgraph.make_graphed_callables(function, inputs)
    out, expected = graphed(*inputs), function(*inputs)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    (mine,), (its,) = (torch.autograd.grad(result.sum(), inputs[1]) for result in (out, expected))
    torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_the_other_choices(device: str) -> None:
    inputs = matrices(device)
    with pytest.raises(fxgraph.UncapturableError, match="cudagraph-unsafe-op"):
        fxgraph.make_graphed_callables(with_a_composite, inputs, options={"on_uncapturable": "error"})
    with pytest.warns(fxgraph.EagerFallbackWarning, match="runs eagerly: .cudagraph-unsafe-op"):
        graphed = fxgraph.make_graphed_callables(with_a_composite, inputs, options={"on_uncapturable": "eager"})
    graphed(*inputs)
    assert not fxgraph.stats(graphed).captures


# -- on a GPU ---------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Attention written by hand, with the constants that people write into it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = q @ k.transpose(-1, -2) / torch.sqrt(torch.tensor(8.0))
        mask = torch.ones(6, 6, dtype=torch.bool).tril().to(x.device)
        weights = torch.where(mask, weights, torch.tensor(torch.finfo(weights.dtype).min))
        table = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], device=x.device)
        return torch.tensor(0.1) * (self.drop(weights.softmax(-1)) @ v) * table[:, None] + torch.linspace(0, 1, 8).to(
            x.device
        )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_constants_trains_as_in_eager_in_one_capture(dtype: torch.dtype) -> None:
    eager = Scaled().to("cuda", dtype)
    twin = copy.deepcopy(eager)
    graphed = fxgraph.make_graphed_callables(twin, (torch.randn(2, 6, 8, device="cuda", dtype=dtype),))
    for _ in range(3):
        x = torch.randn(2, 6, 8, device="cuda", dtype=dtype)
        results = []
        for module, run in ((eager, eager), (twin, graphed)):
            torch.manual_seed(3)
            loss = run(x).square().sum()
            grads = torch.autograd.grad(loss, list(module.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(module.parameters(), grads, strict=True):
                    parameter -= 0.01 * grad
            results.append((loss.detach(), grads))
        torch.testing.assert_close(*results, rtol=0, atol=0)
    stats = fxgraph.stats(graphed)
    assert (len(stats.captures), stats.replays, stats.eager_calls) == (1, 3, 0)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[[0, 2]] * x[:, [1, 1, 0, 3]][:2],
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
        lambda x: x * x.new_tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor(2.0, device=x.device),
        lambda x: x * torch.isin((x > 0).long(), torch.tensor([1, 3], device=x.device)),
        lambda x: x.index_select(0, torch.asarray([3, 0], device=x.device)),
    ],
)
def test_numbers_that_python_holds_are_copied_once_and_captured(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    graphed = fxgraph.make_graphed_callables(lambda x: function(x.sin()).cos(), (x,))
    for _ in range(3):
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        found, expected = graphed(x), function(x.sin()).cos()
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (found, expected)]
        assert torch.equal(*gradients)
    assert (len(fxgraph.stats(graphed).captures), fxgraph.stats(graphed).eager_calls) == (1, 0)
