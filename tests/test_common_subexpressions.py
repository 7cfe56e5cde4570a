"""passes/common_subexpressions.py: equal computations are done once, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes import MergeCommonSubexpressions, Pipeline, apply
from passes.show import show

aten = torch.ops.aten
X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)


def trace(function: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*(args or (X.clone(), Y.clone())))


def merged(gm: GraphModule) -> int:
    """How many nodes went."""
    result = Pipeline((MergeCommonSubexpressions(),))(gm).graph_module
    assert not Pipeline((MergeCommonSubexpressions(),))(result).modified
    return len(gm.graph.nodes) - len(result.graph.nodes)


def test_golden_text() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = (x + y).t().exp()
        two = (x + y).t().exp()
        return one * two + torch.rand_like(x).t() + torch.rand_like(x).t()

    assert (
        show(apply(trace(program), [MergeCommonSubexpressions()]))
        == """\
%x_1 : f32[2, 3] cpu = placeholder
%y_1 : f32[2, 3] cpu = placeholder
%add : f32[2, 3] cpu = aten.add.Tensor(%x_1, %y_1)
%t : f32[3, 2] strides (1, 3) cpu = aten.t.default(%add)
%exp : f32[3, 2] strides (1, 3) cpu = aten.exp.default(%t)
%mul : f32[3, 2] strides (1, 3) cpu = aten.mul.Tensor(%exp, %exp)
%rand_like : f32[2, 3] cpu = aten.rand_like.default(%x_1, pin_memory=False)
%t_2 : f32[3, 2] strides (1, 3) cpu = aten.t.default(%rand_like)
%add_2 : f32[3, 2] strides (1, 3) cpu = aten.add.Tensor(%mul, %t_2)
%rand_like_1 : f32[2, 3] cpu = aten.rand_like.default(%x_1, pin_memory=False)
%t_3 : f32[3, 2] strides (1, 3) cpu = aten.t.default(%rand_like_1)
%add_3 : f32[3, 2] strides (1, 3) cpu = aten.add.Tensor(%add_2, %t_3)
return %add_3"""
    )


MERGED: dict[str, tuple[int, Callable[..., Any]]] = {
    "one operator": (1, lambda x, y: x.exp() + x.exp()),
    "keyword arguments": (1, lambda x, y: x.sum(0, dtype=torch.double) + x.sum(0, dtype=torch.double)),
    "lists": (1, lambda x, y: torch.cat([x, y]) + torch.cat([x, y])),
    # the operator and both of its results, of which one is not used
    "several results": (3, lambda x, y: torch.var_mean(x, dim=0)[0] + torch.var_mean(x, dim=0)[0]),
    "views of memory that is written": (1, lambda x, y: x.view(-1) + (x.view(-1), x.add_(1))[0]),
    "one of both is returned": (1, lambda x, y: (x.exp(), x.exp() + 1)),
    "the earlier of both is returned": (1, lambda x, y: (x.exp() + 1, x.exp())),
    "two that are returned as views, and one that is not": (1, lambda x, y: (x.exp() + 1, x.exp().t(), x.exp()[0])),
    "constructors": (1, lambda x, y: torch.ones(3) + torch.ones(3)),
    "a write elsewhere": (1, lambda x, y: ((a := x.exp()), (z := y.clone()).add_(1), a + x.exp() + z)[2]),
    "after a write": (1, lambda x, y: (x.add_(1), x.exp() + x.exp())[1]),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_is_merged(name: str) -> None:
    count, function = MERGED[name]
    assert merged(trace(function)) == count


APART: dict[str, Callable[..., Any]] = {
    "random numbers": lambda x, y: torch.rand(3) + torch.rand(3),
    "random numbers by a tag only": lambda x, y: aten.uniform(x) + aten.uniform(x),
    "dropout": lambda x, y: aten.native_dropout(x, 0.5, True)[0] + aten.native_dropout(x, 0.5, True)[0],
    "uninitialised memory as it is": lambda x, y: torch.empty(2) + torch.empty(2),
    "uninitialised memory": lambda x, y: torch.empty(2).fill_(0) + torch.empty(2).fill_(0),
    "both written": lambda x, y: x.clone().add_(1) + x.clone().mul_(2),
    "one of both written": lambda x, y: ((a := x.exp()), (b := x.exp()).add_(1), a * b)[2],
    "one of both written through a view": lambda x, y: ((a := x.exp()), (b := x.exp())[0].add_(1), a * b)[2],
    "both returned": lambda x, y: (x.exp(), x.exp()),
    "both returned as views": lambda x, y: (x.exp().t(), x.exp()[0]),
    "two views returned": lambda x, y: (x.t(), x.t()),
    "two views that in-place operators return": lambda x, y: (x.t().add_(1), x.t()),
    "a write between": lambda x, y: ((a := x.exp()), x.add_(1), a + x.exp())[2],
    "a write through a view between": lambda x, y: ((a := x.exp()), x[0].add_(1), a + x.exp())[2],
    "a write into another input between": lambda x, y: ((a := x.exp()), y.add_(1), a + x.exp())[2],
    "0.0 and -0.0": lambda x, y: (x + 0.0) * (x + -0.0),
    "1 and 1.0": lambda x, y: torch.full((2,), 1) + torch.full((2,), 1.0),
    "1 and True": lambda x, y: torch.full((2,), 1) + torch.full((2,), True),
    "other order": lambda x, y: (x + y) * (y + x),
    "in place": lambda x, y: (x.add_(1), x.add_(1))[0],
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not(name: str) -> None:
    assert merged(trace(APART[name])) == 0


def test_two_placeholders_that_lie_on_one_storage_when_called() -> None:
    """The trace saw two tensors; a write into one still keeps reads of the other apart."""
    gm = trace(APART["a write into another input between"])
    result = apply(gm, [MergeCommonSubexpressions()])
    x = X.clone()
    assert torch.equal(result(x, x), X.exp() + (X + 1).exp())


def test_attributes_are_read_once_and_sizes_computed_once() -> None:
    table = torch.ones(2, 3)
    gm = make_fx(lambda x: x + table, tracing_mode="real")(X)
    (read,) = gm.graph.find_nodes(op="get_attr")
    with gm.graph.inserting_after(read):
        second = gm.graph.get_attr(str(read.target))
    second.meta = dict(read.meta)
    call = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    call.args = (second, read)
    gm.recompile()
    assert merged(gm) == 1
    symbolic = trace(
        lambda x, y: x.view(x.shape[0] * x.shape[1]) + x.view(x.shape[0] * x.shape[1]), X, Y, mode="symbolic"
    )
    result = apply(symbolic, [MergeCommonSubexpressions()])
    assert len(symbolic.graph.find_nodes(op="call_function", target=aten.view.default)) == 2
    assert len(result.graph.find_nodes(op="call_function", target=aten.view.default)) == 1


def test_sizes_that_come_from_the_data_stay_apart() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm = trace(lambda x, y: x.nonzero().sum() + x.nonzero().sum(), X, Y, mode="symbolic")
    assert merged(gm) == 0
