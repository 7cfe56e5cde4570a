"""passes/dead_code.py: what nobody sees goes, what somebody might see stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes import Pipeline, RemoveDeadCode, apply
from passes.show import show

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


@torch.library.custom_op("passes_test::logs", mutates_args=())
def logs(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@logs.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def trace(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(X.clone())


def calls(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_golden_text() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        scratch = x + 1
        scratch[0].mul_(2)  # memory of the graph's own that nothing reads
        torch.rand_like(x)  # moves the generator
        kept = x * 3
        kept[0].add_(1)  # seen through what is returned
        return kept

    result = Pipeline((RemoveDeadCode(),))(trace(program))
    assert (
        show(result.graph_module)
        == """\
%x_1 : f32[2, 3] cpu = placeholder
%rand_like : f32[2, 3] cpu = aten.rand_like.default(%x_1, pin_memory=False)
%mul : f32[2, 3] cpu = aten.mul.Tensor(%x_1, 3)
%select_1 : f32[3] cpu = aten.select.int(%mul, 0, 0)
%add_ : f32[3] cpu = aten.add_.Tensor(%select_1, 1)
return %mul"""
    )
    assert not Pipeline((RemoveDeadCode(),))(result.graph_module).modified


DEAD: dict[str, Callable[..., Any]] = {
    "a chain": lambda x: (x.exp().sum(), x + 1)[1],
    "several results": lambda x: (torch.var_mean(x, dim=0), x + 1)[1],
    "a view": lambda x: (x.t(), x + 1)[1],
    "a write into a copy": lambda x: (x.clone().add_(1), x + 1)[1],
    "a write into an element": lambda x: (torch.var_mean(x, dim=0)[0].add_(1), x + 1)[1],
    "writes one upon the other": lambda x: (x.clone().add_(1).mul_(2).t().sub_(3), x + 1)[1],
    "a write into what was read before": lambda x: ((y := x.clone()) + 1, y.add_(1))[0],
}
REST = {"a write into what was read before": ["aten.clone.default", "aten.add.Tensor"]}


@pytest.mark.parametrize("name", DEAD)
def test_what_goes(name: str) -> None:
    gm = trace(DEAD[name])
    assert len(calls(gm)) > 1
    assert calls(apply(gm, [RemoveDeadCode()])) == REST.get(name, ["aten.add.Tensor"])


LIVE: dict[str, Callable[..., Any]] = {
    "random numbers": lambda x: (torch.randn(2), x + 1)[1],
    "random numbers drawn in place": lambda x: (torch.empty(2).normal_(), x + 1)[1],
    "dropout": lambda x: (torch.dropout(x, 0.5, True), x + 1)[1],
    "a write into an input": lambda x: (x.add_(1), 3)[1],
    "a write into a view of an input": lambda x: (x.t()[0].add_(1), 3)[1],
    "a write that is read": lambda x: ((y := x.clone()).add_(1), y * 2)[1],
    "a write that is read through a view": lambda x: ((y := x.clone()).view(-1).add_(1), y * 2)[1],
    "a write that is returned": lambda x: ((y := x.clone())[0].add_(1), y)[1],
    "a custom operator": lambda x: (torch.ops.passes_test.logs(x), x + 1)[1],
    "an assert": lambda x: (aten._assert_async(x.sum() > 0), x + 1)[1],
    "running statistics": lambda x: (torch.batch_norm(x, None, None, x[0], x[1], True, 0.1, 1e-5, False), 3)[1],
}


@pytest.mark.parametrize("name", LIVE)
def test_what_stays(name: str) -> None:
    gm = trace(LIVE[name])
    before = [call for call in calls(gm) if "empty.memory" not in call and "getitem" not in call]
    after = calls(apply(gm, [RemoveDeadCode()]))
    mattering = {
        call for call in before if call not in ("aten.bernoulli_.float", "aten.div_.Scalar", "aten.mul.Tensor")
    }
    assert mattering <= {*after}


def test_a_tuple_that_is_returned_whole_keeps_the_writes_into_its_elements() -> None:
    gm = trace(lambda x: torch.var_mean(x, dim=0)[0].add_(1))
    gm.graph.output_node().args = (next(node for node in gm.graph.nodes if "var_mean" in node.name),)
    gm.recompile()
    assert "aten.add_.Tensor" in calls(apply(gm, [RemoveDeadCode()]))


def test_placeholders_stay() -> None:
    gm = make_fx(lambda x, y: y + 1, tracing_mode="fake")(X, X)
    assert len(apply(gm, [RemoveDeadCode()]).graph.find_nodes(op="placeholder")) == 2
