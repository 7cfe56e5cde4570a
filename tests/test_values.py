"""Fake values made anew after a change of a torch-level graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from passes import check
from passes.facts import value_of
from passes.values import refresh_values

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def read() -> Callable[..., fx.GraphModule]:
    """The graph that Dynamo makes of a function."""
    torch._dynamo.reset()

    def graph_of(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
        found: list[fx.GraphModule] = []

        def backend(gm: fx.GraphModule, _: Any) -> Any:
            found.append(gm)
            return gm.forward

        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        return found[0]

    return graph_of


def values(gm: fx.GraphModule) -> dict[str, Any]:
    return {
        node.name: tuple(value.shape) if isinstance(value := value_of(node), FakeTensor) else value
        for node in gm.graph.nodes
        if node.op.startswith("call_")
    }


def test_every_value_follows_from_the_graph_as_it_is(read: Callable[..., fx.GraphModule]) -> None:
    gm = read(lambda x, w: (x @ w).sin().sum(0), X, torch.ones(4, 2, requires_grad=True))
    (sin,) = gm.graph.find_nodes(op="call_method", target="sin")
    sin.target = "t"
    refresh_values(gm)
    assert list(values(gm).values()) == [(3, 2), (2, 3), (3,)]
    assert all(value_of(node).requires_grad for node in gm.graph.nodes if node.op.startswith("call_"))


def test_asserts_on_what_is_known_now_go(read: Callable[..., fx.GraphModule]) -> None:
    gm = read(lambda x: x[0] + torch.bincount(x.long().abs().view(-1), minlength=4), X)
    (count,) = gm.graph.find_nodes(op="call_function", target=torch.bincount)
    count.target, count.args, count.kwargs = F.relu, (gm.graph.find_nodes(op="placeholder")[0],), {}
    with gm.graph.inserting_after(count):
        first = gm.graph.call_function(torch.select, (count, 0, 0))
    count.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
    asserts = torch.ops.aten._assert_scalar.default
    assert gm.graph.find_nodes(op="call_function", target=asserts)
    assert not check(gm).ok
    refresh_values(gm)
    assert not gm.graph.find_nodes(op="call_function", target=asserts)
    assert check(gm).ok
    torch.testing.assert_close(gm(X)[0], X[0] + F.relu(X)[0])


def test_asserts_on_what_depends_on_data_stay(read: Callable[..., fx.GraphModule]) -> None:
    gm = read(lambda x: x[0] + torch.bincount(x.long().abs().view(-1), minlength=4), X)
    asserts = torch.ops.aten._assert_scalar.default
    before = len(gm.graph.find_nodes(op="call_function", target=asserts))
    refresh_values(gm)
    assert 0 < len(gm.graph.find_nodes(op="call_function", target=asserts)) <= before
    assert not check(gm).ok


def test_values_end_where_an_op_fails(read: Callable[..., fx.GraphModule]) -> None:
    gm = read(lambda x: x.sin().cos().exp(), X)
    (cos,) = gm.graph.find_nodes(op="call_method", target="cos")
    cos.args = (cos.args[0], "no such argument")
    refresh_values(gm)
    assert list(values(gm).values()) == [(3, 4), None, None]


def test_what_cannot_be_run_again_keeps_its_values(read: Callable[..., fx.GraphModule]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return y.cos()

    gm = read(function, X)
    (sin,) = gm.graph.find_nodes(op="call_method", target="sin")
    sin.target = "t"
    before = values(gm)
    refresh_values(gm)
    assert values(gm) == before
