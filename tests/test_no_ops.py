"""passes/no_ops.py: views, casts and copies go where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes import LowerToAten, Pipeline, RemoveNoOps, apply
from passes.show import show

aten = torch.ops.aten
X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)


def trace(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(X.clone(), Y.clone())


def removed(function: Callable[..., Any]) -> int:
    gm = trace(function)
    result = Pipeline((RemoveNoOps(),))(gm).graph_module
    assert not Pipeline((RemoveNoOps(),))(result).modified
    return len(gm.graph.nodes) - len(result.graph.nodes)


def test_golden_text() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        same = aten.alias(x.view(2, 3)).expand(2, 3)
        copy = aten._to_copy(same, dtype=torch.float32).clone()
        return copy.exp(), x.t().clone() + 1, y.double().sum()

    assert (
        show(apply(trace(program), [RemoveNoOps()]))
        == """\
%x_1 : f32[2, 3] cpu = placeholder
%y_1 : f32[2, 3] cpu = placeholder
%exp : f32[2, 3] cpu = aten.exp.default(%x_1)
%t : f32[3, 2] strides (1, 3) cpu = aten.t.default(%x_1)
%add : f32[3, 2] strides (1, 3) cpu = aten.add.Tensor(%t, 1)
%_to_copy_1 : f64[2, 3] cpu = aten._to_copy.default(%y_1, dtype=torch.float64)
%sum_1 : f64[] cpu = aten.sum.default(%_to_copy_1)
return (%exp, %add, %sum_1)"""
    )


GONE: dict[str, tuple[int, Callable[..., Any]]] = {
    "slice of everything": (1, lambda x, y: aten.slice(x, 0, 0, 9) + 1),
    "permutation of nothing": (1, lambda x, y: x.permute(0, 1) + 1),
    "squeeze of nothing": (1, lambda x, y: aten.squeeze.dim(x, 0) + 1),
    "transpose of one with itself": (1, lambda x, y: x.transpose(0, 0) + 1),
    "unsafe view": (1, lambda x, y: aten._unsafe_view(x, [2, 3]) + 1),
    "a view of memory that is written": (1, lambda x, y: (aten.alias(x).add_(1), 3)[1]),
    "two views": (2, lambda x, y: aten.alias(aten.alias(x)) + 1),
    "two copies": (2, lambda x, y: x.clone().clone() + 1),
    "a copy and a write before it": (1, lambda x, y: (x.add_(1), x.clone() + 1)[1]),
    "a copy and a write after its last use": (1, lambda x, y: (x.clone() + 1, x.add_(1))[0]),
}


@pytest.mark.parametrize("name", GONE)
def test_what_goes(name: str) -> None:
    count, function = GONE[name]
    assert removed(function) == count


KEPT: dict[str, Callable[..., Any]] = {
    "a returned view": lambda x, y: aten.alias(x),
    "a returned copy": lambda x, y: x.clone(),
    "a view that an in-place operator returns": lambda x, y: x.view(2, 3).add_(y),
    "a view that two in-place operators return": lambda x, y: x.view(2, 3).add_(y).mul_(2),
    "a copy that is returned as a view": lambda x, y: x.clone().t(),
    "a copy that is written": lambda x, y: x.clone().add_(1) * 2,
    "a copy that is written through a view": lambda x, y: ((c := x.clone())[0].add_(1), c * 2)[1],
    "a copy of what is written while in use": lambda x, y: ((c := x.clone()), x.add_(1), c * 2)[2],
    "a copy of what is written through a view": lambda x, y: ((c := x.clone()), x[0].add_(1), c * 2)[2],
    "a copy that is read by the write": lambda x, y: ((c := x.clone()), x.copy_(c.flip(0)), x.mul_(c), 3)[3],
    "a copy while another input is written": lambda x, y: ((c := x.clone()), y.add_(1), c * 2)[2],
    "another dtype": lambda x, y: x.double() + 1,
    "other strides": lambda x, y: x.t().contiguous() + 1,
    "a part": lambda x, y: x[:1] + 1,
    "a transposed square": lambda x, y: (x @ y.t()).t() + 1,
    "a copy of a part that is read by strides": lambda x, y: x[1].clone().as_strided((2,), (1,), 0) + 1,
    "as_strided": lambda x, y: x.as_strided((2, 2), (1, 1)).as_strided((2, 2), (1, 1), 1) + 1,
    "detach": lambda x, y: x.detach() + 1,
    "a view whose strides change in place": lambda x, y: aten.alias(x).t_() + 1,
    "a view of another dtype": lambda x, y: x.view(torch.int32) + 1,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name: str) -> None:
    assert removed(KEPT[name]) == 0


class Casts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(x, 0.5, training=False).to(torch.float32).contiguous().type_as(x)
        return kept.reshape(2, 3) + x.to(torch.float32, copy=True)


def test_casts_and_dropout_as_torch_export_leaves_them() -> None:
    gm = torch.export.export(Casts(), (X,)).module()
    for guard in gm.graph.find_nodes(op="call_module", target="_guards_fn"):
        gm.graph.erase_node(guard)  # it is no operator; LowerToAten drops it too
    gm.recompile()
    result = apply(gm, [RemoveNoOps()])
    calls = [str(node.target) for node in result.graph.nodes if node.op == "call_function"]
    # Whether `to` copied is not known at this level, so the one that is told to is not taken as memory of its own.
    assert [call for call in calls if "_assert_" not in call] == ["aten.to.dtype", "aten.add.Tensor"]
    lowered = apply(gm, [LowerToAten(), RemoveNoOps()])
    calls = [str(node.target) for node in lowered.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if "_assert_" not in call] == ["aten.add.Tensor"]
    assert torch.equal(lowered(X), X + X)
    assert torch.equal(result(X), X + X)


def test_dropout_in_training_is_no_no_op() -> None:
    gm = torch.fx.Graph()
    x = gm.placeholder("x")
    call = gm.call_function(aten.dropout.default, (x, 0.0, True))
    gm.output(gm.call_function(aten.neg.default, (call,)))
    mode = torch._subclasses.FakeTensorMode()
    for node in gm.nodes:
        node.meta["val"] = mode.from_tensor(X)
    module = torch.fx.GraphModule(torch.nn.Module(), gm)
    assert not Pipeline((RemoveNoOps(),))(module).modified
    call.args = (x, 0.0, False)
    module.recompile()
    assert Pipeline((RemoveNoOps(),))(module).modified
