"""Stages of torch-level graphs: what may cross a break does, what has an order keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from passes.split import assign_stages, calls_of_stages, feeding_outputs, split


def traced(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """A torch-level graph with fakes, as Dynamo leaves it."""
    graph = fx.symbolic_trace(function)
    Described(graph).run(*inputs)
    return graph


class Described(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def named(graph: fx.GraphModule, *names: str) -> list[fx.Node]:
    found = {node.name: node for node in graph.graph.nodes}
    return [found[name] for name in names]


def stages_of(graph: fx.GraphModule, eager: Sequence[str], cut: Sequence[str] = ()) -> dict[str, int]:
    found = assign_stages(graph, named(graph, *eager), named(graph, *cut))
    return {node.name: stage for node, stage in found.items()}


def test_what_does_not_depend_on_a_break_crosses_it() -> None:
    graph = traced(lambda x: (x.sin().cos().exp() + x.tan(), x.tanh()), torch.ones(2))
    assert stages_of(graph, ["cos"]) == {"sin": 0, "cos": 1, "exp": 2, "tan": 0, "add": 2, "tanh": 0}


def test_breaks_that_do_not_depend_on_each_other_share_a_stage() -> None:
    graph = traced(lambda x: x.sin().cos() + x.tan().tanh(), torch.ones(2))
    assert stages_of(graph, ["cos", "tanh"]) == {"sin": 0, "cos": 1, "tan": 0, "tanh": 1, "add": 2}


def test_what_an_eager_op_gives_is_taken_apart_where_it_runs() -> None:
    def function(x: torch.Tensor) -> Any:
        values, vectors = torch.linalg.eigh(x.sin())
        return values.cos(), vectors.cos()[0]

    graph = traced(function, torch.eye(2))
    stages = stages_of(graph, ["linalg_eigh"])
    assert {name: stage for name, stage in stages.items() if name.startswith("getitem")} == {
        "getitem": 1,
        "getitem_1": 1,
        "getitem_2": 2,
    }
    glue = split(graph, assign_stages(graph, named(graph, "linalg_eigh")))
    given = [node.meta.get("example_value") for node in glue.submod_2.graph.find_nodes(op="placeholder")]
    assert all(isinstance(value, torch.Tensor) for value in given) and len(given) == 2


def test_random_ops_keep_their_order() -> None:
    graph = traced(lambda x: (F.dropout(x.sin()).cos(), F.dropout(x), x.exp()), torch.ones(2))
    assert stages_of(graph, ["sin"]) == {"sin": 1, "dropout": 2, "cos": 2, "dropout_1": 2, "exp": 0}


def test_ops_on_memory_that_is_changed_keep_their_order() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        before = x.sum()
        chosen = x.sin()
        x.add_(1)
        return before, chosen, x.exp(), y.exp()

    graph = traced(function, torch.ones(2), torch.ones(2))
    assert stages_of(graph, ["sin"]) == {"sum_1": 0, "sin": 1, "add_": 2, "exp": 2, "exp_1": 0}


def test_a_graph_that_switches_grad_mode_keeps_its_order() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.sin().cos()
        torch._C._set_grad_enabled(False)
        z = x.exp()
        torch._C._set_grad_enabled(True)
        return y, z

    graph = fx.Graph()
    x = graph.placeholder("x")
    sin = graph.call_method("sin", (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    cos = graph.call_method("cos", (sin,))
    exp = graph.call_method("exp", (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((cos, exp, graph.call_method("tan", (x,))))
    module = fx.GraphModule({}, graph)
    x = torch.ones(2, requires_grad=True)
    Described(module).run(x)
    stages = assign_stages(module, [cos])
    assert [stages[node] for node in (sin, cos, exp)] == [0, 1, 2]
    assert sorted(stages.values()) == list(stages.values())
    for one, other in zip(split(module, stages)(x), module(x), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def test_a_cut_holds_for_what_gradients_pass() -> None:
    graph = traced(lambda x: (lambda y: (y, y.sum(), y.argmax()))(x.sin()), torch.ones(2, requires_grad=True))
    assert feeding_outputs(graph) == named(graph, "sin")
    assert stages_of(graph, [], ["sin"]) == {"sin": 0, "sum_1": 2, "argmax": 0}


@pytest.mark.parametrize(
    ("function", "feeding"),
    [
        (lambda x: (x.sin(), x.cos()), []),
        (lambda x: (lambda y: (y, y.detach().exp()))(x.sin()), []),
        (lambda x: (lambda y: (y, y.view(-1)))(x.sin()), []),
        (lambda x: (lambda y: (y, y.view(-1).exp()))(x.sin()), ["sin"]),
        (lambda x: (lambda y: (y, y.cos().exp()))(x.sin()), ["sin"]),
        (lambda x: (lambda y: (y, y.cos(), y.cos().exp()))(x.sin()), ["sin"]),
        (lambda x: (lambda y, z: (y, z, z.exp()))(x.sin(), x.cos()), ["cos"]),
        (lambda x: (x, x.exp()), []),
        (lambda x: (lambda y: (y, y.exp(), y.add_(1))[:2])(x.sin()), []),  # of the value before it was changed
        (lambda x: (lambda y: (y.add_(1), (y, y.exp()))[1])(x.sin()), ["sin"]),
    ],
)
def test_outputs_that_feed_others(function: Callable[..., Any], feeding: list[str]) -> None:
    graph = traced(function, torch.ones(2, requires_grad=True))
    assert [node.name for node in feeding_outputs(graph)] == feeding


# -- any program ------------------------------------------------------------------------------------------------------

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.clone().add_(b),
    "change": lambda a, b: a.mul_(0.5),
    "drop": lambda a, b: F.dropout(a, 0.5),
    "draw": lambda a, b: a + torch.rand_like(a),
    "view": lambda a, b: a.view(-1).view_as(a),
    "relu_": lambda a, b: F.relu((a * 2), True),
}
_ops = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9), st.booleans())
programs = st.lists(_ops, min_size=2, max_size=12)
"""Op, two operands (counted backwards among the values so far), whether it is a break."""


def run(program: list[tuple[str, int, int, bool]], x: torch.Tensor) -> list[torch.Tensor]:
    values = [x * 1, x * 2]
    for name, first, second, _ in program:
        values.append(OPS[name](values[-1 - first % len(values)], values[-1 - second % len(values)]))
    return values


@given(program=programs)
def test_any_split_gives_the_same(program: list[tuple[str, int, int, bool]]) -> None:
    x = torch.linspace(-1, 1, 6).view(2, 3)
    torch.manual_seed(0)
    expected = run(program, x)
    drawn = torch.rand(1)
    graph = make_fx(lambda x: run(program, x))(x)
    Described(graph).run(x)
    ops = [node for node in graph.graph.nodes if node.op == "call_function"]
    breaks = {op for op, (_, _, _, is_break) in zip(ops, program * len(ops), strict=False) if is_break}
    stages = assign_stages(graph, breaks)
    assert all(stage % 2 == (node in breaks) for node, stage in stages.items())
    glue = split(graph, stages)
    torch.manual_seed(0)
    found = glue(x)
    assert torch.equal(torch.rand(1), drawn)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    order = [int(str(node.target).removeprefix("submod_")) for node, _ in calls_of_stages(glue)]
    assert order == sorted(set(stages.values()))
