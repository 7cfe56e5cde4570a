"""Rules and rewrites on the graphs of four tracers: symbolic_trace, make_fx, torch.export and Dynamo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from strategies_fx import describe
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils import _pytree as pytree

from passes import (
    CAPTURABLE,
    CloneAliasedOutputs,
    DrawInPlace,
    Functionalize,
    LowerToAten,
    MergeCommonSubexpressions,
    MergeInputCopies,
    MoveConstantsToDevice,
    PassError,
    Pipeline,
    RemoveDeadCode,
    RemoveNoOps,
    apply,
    check,
    find_repeats,
)
from passes.verify import verify

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(torch.nn.Module):
    """Parameters, buffers that it writes, dropout, a literal, equal layers, a view as output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        unused = x.exp()
        del unused
        y = self.drop(self.norm(x)) * torch.tensor(2.0) + x.view(3, 4).contiguous().exp() * x.exp()
        return y, y.t()


@dataclass
class Traced:
    """A graph with a way to call it on ``x``, and the module that it was made of."""

    gm: GraphModule
    module: torch.nn.Module
    inputs: tuple[Any, ...] = (X,)

    def call(self, gm: GraphModule, x: torch.Tensor) -> Any:
        """Call ``gm``, made from `gm`, with ``x`` in the place of the example and the parameters where they are."""
        return gm(*(x if one is X else one for one in self.inputs))


def by_dynamo(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    found: list[Traced] = []

    def backend(gm: GraphModule, inputs: list[torch.Tensor]) -> Any:
        found.append(Traced(gm, module, tuple(inputs)))  # parameters and buffers are inputs too
        return gm

    state = [value.clone() for value in module.buffers()]
    torch.compile(module, backend=backend, fullgraph=True)(x)
    for buffer, value in zip(module.buffers(), state, strict=True):
        buffer.copy_(value)
    return found[0]


def by_make_fx(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    # With real tensors, so that the graph's attributes are the module's own.
    state = [value.clone() for value in module.buffers()]
    traced = Traced(make_fx(module, tracing_mode="real")(x), module)
    for buffer, value in zip(module.buffers(), state, strict=True):
        buffer.copy_(value)
    return traced


def by_export(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    gm = torch.export.export(module, (x,)).module()
    return Traced(gm, gm)  # it has copies of the buffers


TRACERS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Traced]] = {
    "symbolic_trace": lambda module, x: Traced(symbolic_trace(module), module),
    "make_fx": by_make_fx,
    "torch.export": by_export,
    "dynamo": by_dynamo,
}
ATEN_LEVEL = {"make_fx"}  # of those of torch.export, the check of the inputs is no operator


class Negated(PassBase):
    """A pass of torch.fx: tanh of the opposite."""

    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, False)


def removes_nothing(gm: GraphModule) -> None:
    """A plain function that changes its argument, here by nothing."""
    gm.graph.lint()
    gm.recompile()


REWRITES: dict[str, tuple[Any, ...]] = {
    "RemoveDeadCode": (RemoveDeadCode(),),
    "MergeCommonSubexpressions": (MergeCommonSubexpressions(),),
    "RemoveNoOps": (RemoveNoOps(),),
    "MoveConstantsToDevice": (MoveConstantsToDevice(),),
    "Functionalize": (Functionalize(), DrawInPlace()),
    "MergeInputCopies": (Functionalize(), DrawInPlace(), MergeInputCopies()),
    "CloneAliasedOutputs": (CloneAliasedOutputs((0, 1)),),
    "torch.fx's": (Negated(), removes_nothing),
    "all": (
        *(Functionalize(), DrawInPlace(), RemoveNoOps(), MergeCommonSubexpressions(), RemoveDeadCode()),
        *(CloneAliasedOutputs((0, 1)), MoveConstantsToDevice(), MergeInputCopies()),
    ),
}


def results(call: Callable[[torch.Tensor], Any]) -> list[Any]:
    torch.manual_seed(5)
    outputs = pytree.tree_leaves(call(X.clone()))
    return [*map(describe, outputs), bytes(torch.get_rng_state().tolist())]


def state(module: torch.nn.Module) -> list[Any]:
    return [describe(value) for _, value in sorted(module.named_buffers()) if value.shape == (4,)]


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", REWRITES)
def test_every_rewrite_keeps_what_each_tracers_graph_does(tracer: str, name: str) -> None:
    passes, twin = REWRITES[name], Net()
    traced = TRACERS[tracer](Net(), X)
    inputs = (X,) if tracer == "symbolic_trace" else None
    rewritten = apply(traced.gm, [LowerToAten(inputs), *passes])
    assert verify(rewritten)
    for _ in range(2):
        assert results(lambda x: traced.call(rewritten, x)) == results(twin)
    module = rewritten if tracer == "torch.export" else traced.module
    assert state(module) == state(twin)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize(
    "one",
    [RemoveDeadCode(), MergeCommonSubexpressions(), RemoveNoOps(), MoveConstantsToDevice(), MergeInputCopies()],
    ids=lambda one: type(one).__name__,
)
def test_a_graph_that_is_no_aten_graph_is_refused_by_name(tracer: str, one: Any) -> None:
    gm = TRACERS[tracer](Net(), X).gm
    if tracer in ATEN_LEVEL:
        assert verify(apply(gm, [one]))
        return
    with pytest.raises(PassError) as caught:
        apply(gm, [one])
    assert (caught.value.stage, caught.value.report.ids[0]) == ("requires", "aten-level")


@pytest.mark.parametrize("tracer", TRACERS)
def test_equal_layers_are_found_in_each_tracers_graph(tracer: str) -> None:
    found = find_repeats(TRACERS[tracer](Net(), X).gm, min_size=2)
    assert found.groups[0].count == 3


class Bad(torch.nn.Module):
    """One line per rule that a tracer can leave in a graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "data-dependent-shape":
            return torch.masked_select(x, x > 0)
        if self.kind == "host-sync":
            return torch.linalg.inv(x[:, :3])
        if self.kind == "unsupported-layout":
            return x.to_sparse().to_dense()
        if self.kind == "higher-order-op":
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        if self.kind == "no-fake-impl":
            return torch.ops.passes_test.only_real(x)
        if self.kind == "cudagraph-unsafe-op":
            return torch.ops.passes_test.not_in_graphs(x)
        return x + 1


@torch.library.custom_op("passes_test::not_in_graphs", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def not_in_graphs(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@not_in_graphs.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("passes_test::only_real", mutates_args=())
def only_real(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


BAD = {
    "data-dependent-shape": set(TRACERS),
    "host-sync": set(TRACERS),
    "unsupported-layout": {"symbolic_trace", "make_fx"},  # the others cannot trace sparse tensors
    "cudagraph-unsafe-op": set(TRACERS),
    "higher-order-op": {"make_fx", "torch.export", "dynamo"},  # symbolic_trace cannot trace it
    "no-fake-impl": {"symbolic_trace", "make_fx"},  # the others run it on fake tensors and fail
    "nothing": set(TRACERS),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("kind", BAD)
def test_each_rule_is_judged_alike_on_each_tracers_graph(tracer: str, kind: str) -> None:
    if tracer not in BAD[kind]:
        return
    assert kind == "nothing" or kind in {rule.id for rule in CAPTURABLE}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm = TRACERS[tracer](Bad(kind), X).gm
    assert check(gm).ids == (() if kind == "nothing" else (kind,))


def test_lowering_names_what_it_misses() -> None:
    gm = symbolic_trace(lambda x, y: x + y)
    for given, message in (
        (None, "no fake values on x, y: give example inputs"),
        ((X,), "1 inputs for 2 placeholders"),
    ):
        with pytest.raises(PassError, match=message) as caught:
            apply(gm, [LowerToAten(given)])
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("tracer", TRACERS)
def test_lowering_twice_changes_nothing_more(tracer: str) -> None:
    inputs = (X,) if tracer == "symbolic_trace" else None
    once = apply(TRACERS[tracer](Net(), X).gm, [LowerToAten(inputs)])
    assert not Pipeline((LowerToAten(),))(once).modified


def test_sizes_that_dynamo_leaves_open_stay_open() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(y)
        return x.reshape(-1) * x.shape[0], (x + y).view(y.shape[0], -1).exp()

    graphs: list[GraphModule] = []
    compiled = torch.compile(program, backend=lambda gm, _: graphs.append(gm) or gm, dynamic=True, fullgraph=True)
    compiled(torch.ones(3, 4), torch.ones(3, 4))
    rewrites = [LowerToAten(), Functionalize(), RemoveNoOps(), MergeCommonSubexpressions(), RemoveDeadCode()]
    gm = apply(graphs[0], rewrites)
    given = {2: torch.ones(5, 2), 3: torch.ones(5, 2)}  # behind the two sizes
    got = gm(5, 2, *given.values())
    x = torch.ones(5, 2)
    for one, other in zip(got, program(x, torch.ones(5, 2)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(given[2], x)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch.export's own
def test_passes_take_a_decomposed_export_with_write_backs() -> None:
    """torch.export leaves the write-backs of BatchNorm's statistics without values."""
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)), torch.randn(4, 3)
    eager = copy.deepcopy(module)  # an exported module shares its buffers with the original
    gm = torch.export.export(module, (x,)).run_decompositions().module()
    expected, statistics = eager(x), eager[1].running_mean
    lowered = apply(gm, [LowerToAten((x,))])
    torch.testing.assert_close(lowered(x), expected)
    torch.testing.assert_close(dict(lowered.named_buffers())["1.running_mean"], statistics)


def test_passes_take_assignments_and_asserts_that_dynamo_leaves_without_values() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] = 3.0
        y[1:] = x[:-1]
        torch._assert_async(y.sum() < 1e9)
        return y

    graphs: list[GraphModule] = []
    torch.compile(program, backend=lambda gm, _: graphs.append(gm) or gm.forward)(torch.randn(4, 4))
    x = torch.randn(4, 4)
    for rewrites in ([], [LowerToAten()], [LowerToAten(), Functionalize(), RemoveDeadCode()]):
        assert torch.equal(apply(graphs[0], rewrites)(x)[0], program(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch.export's own
def test_passes_take_an_export_that_returns_what_it_writes_back() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.count.add_(1)
            return x * 2, self.count + 0

    module, x = Counter(), torch.randn(3, 4)
    eager = copy.deepcopy(module)
    gm = torch.export.export(module, (x,)).run_decompositions().module()
    for rewrites in ([], [LowerToAten()]):
        rewritten = apply(gm, rewrites)
        for _ in range(2):
            assert all(map(torch.equal, rewritten(x), eager(x)))


def test_the_example_of_a_tensor_is_a_tensor() -> None:
    gm = make_fx(lambda x: x * 2, tracing_mode="fake")(torch.randn(4))
    with pytest.raises(PassError, match="x_1 is a tensor, and its example is 3"):
        apply(gm, [LowerToAten((3,))])


class Projected(nn.Module):
    """A linear layer on what is not contiguous, which ``matmul`` folds only if the weight requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(5, 15), nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.transpose(0, 1)).relu()
        return torch.softmax(self.attention(y, y, y)[0], -1) @ self.linear.weight.sin()


@pytest.mark.parametrize("trains", [True, False])
def test_lowered_products_are_those_of_parameters_that_require_grad(trains: bool) -> None:
    module = Projected().requires_grad_(trains)
    x = torch.randn(2, 4, 5)
    lowered = apply(symbolic_trace(module), [LowerToAten((x,))])
    assert torch.equal(lowered(x), module(x))
    assert not [node for node in lowered.graph.nodes if node.target is torch.ops.aten.detach.default and not node.users]


def test_sizes_that_are_symbols_stay_so_whatever_the_examples() -> None:
    def function(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x * x.shape[0]).reshape(-1) * 2 + t.sum()

    examples = (torch.randn(5, 3), torch.randn(3))
    lowered = apply(make_fx(function, tracing_mode="symbolic")(*examples), [LowerToAten(examples)])
    for rows in (5, 7, 2):
        x = torch.randn(rows, 3)
        assert torch.equal(lowered(x, examples[1]), function(x, examples[1]))
