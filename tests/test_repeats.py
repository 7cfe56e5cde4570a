"""passes/repeats.py: equal regions are found, whatever their parameters are called, and only equal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_fx import Program, programs
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from passes import LowerToAten, Repeats, apply, find_repeats


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


def network(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), *(Layer() for _ in range(layers)), torch.nn.Linear(4, 2))


def lowered(module: torch.nn.Module, *inputs: torch.Tensor) -> GraphModule:
    return apply(symbolic_trace(module), [LowerToAten(inputs)])


def test_equal_layers_are_found_with_what_they_read_and_give() -> None:
    gm = lowered(network(5), torch.ones(2, 3))
    (repeat,) = find_repeats(gm)
    # transpose, addmm, relu, add
    assert (repeat.count, repeat.size, repeat.saved) == (5, 4, 16)
    first, second = repeat.regions[:2]
    assert [str(node.target) for node in first.nodes] == [
        "aten.t.default",
        "aten.addmm.default",
        "aten.relu.default",
        "aten.add.Tensor",
    ]
    assert [node.name for node in second.inputs] == ["_1_linear_weight", "_1_linear_bias", first.nodes[-1].name] or [
        node.op for node in second.inputs
    ] == ["get_attr", "get_attr", "call_function"]
    assert second.outputs == (second.nodes[-1],)
    assert str(find_repeats(gm)).startswith("5 × 4 calls, first at ")


def test_torch_level_graphs_are_searched_as_they_are() -> None:
    gm = symbolic_trace(network(4))
    (repeat,) = find_repeats(gm)
    # the linear module, the method relu, the addition
    assert (repeat.count, repeat.size) == (4, 3)


def trace(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.ones(2, 2), torch.ones(2, 2))


def sizes(found: Repeats) -> list[tuple[int, int]]:
    return [(repeat.count, repeat.size) for repeat in found]


def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y).relu() + x


CASES: dict[str, tuple[list[tuple[int, int]], Callable[..., Any]]] = {
    "one after another": ([(3, 3)], lambda x, y: layer(layer(layer(x, y), y), y)),
    "side by side": ([(2, 3)], lambda x, y: layer(x, y) * layer(y, x)),
    "another constant": ([], lambda x, y: ((x @ y).relu() + 1) * ((x @ y).relu() + 2)),
    "other wiring inside": ([], lambda x, y: ((a := x @ y).relu() + a) * ((y @ x).relu() + x)),
    "one input twice against two inputs": ([], lambda x, y: ((x @ x).relu() + x) * ((x @ y).relu() + x)),
    "other sizes": ([], lambda x, y: ((x @ y).relu() + x).sum() * ((x[:1] @ y).relu() + x[:1]).sum()),
    "two kinds": (
        [(3, 3), (2, 4)],
        lambda x, y: (layer(layer(layer(x, y), y), y).exp().sin().cos().tan() * y).exp().sin().cos().tan(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_which_regions_are_equal(name: str) -> None:
    expected, function = CASES[name]
    assert sizes(find_repeats(trace(function))) == expected


def test_sizes_of_regions_can_be_bounded() -> None:
    gm = trace(lambda x, y: layer(layer(x, y), y))
    assert sizes(find_repeats(gm, min_size=4)) == []
    assert sizes(find_repeats(gm, max_size=2, min_size=2)) == [(2, 2)]
    assert str(find_repeats(gm, min_size=4)) == "no repeats"
    for wrong in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="min_size"):
            find_repeats(gm, *wrong)


def isomorphic(first: tuple[Node, ...], second: tuple[Node, ...]) -> bool:
    """The definition, written anew: one map of nodes carries each call and all that it reads to the other's."""
    carried: dict[Node, Node] = {}
    for one, other in zip(first, second, strict=True):
        mine, yours = (pytree.tree_flatten((node.args, node.kwargs)) for node in (one, other))
        if one.target != other.target or mine[1] != yours[1]:
            return False
        for a, b in zip(mine[0], yours[0], strict=True):
            if isinstance(a, Node) != isinstance(b, Node):
                return False
            if isinstance(a, Node):
                if (a in first) != (b in second) or carried.setdefault(a, b) is not b:
                    return False
            elif (type(a), repr(a)) != (type(b), repr(b)):
                return False
        if carried.setdefault(one, other) is not other:
            return False
    return len(set(carried.values())) == len(carried)


@given(program=programs(max_lines=6), copies=st.integers(1, 3))
def test_found_regions_are_isomorphic_and_disjoint(program: Program, copies: int) -> None:
    repeated = Program(program.inputs, program.lines * copies, program.returned[:1])
    try:
        gm = repeated.trace()
    except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):  # in-place lines ran once when drawn
        return
    found = find_repeats(gm, min_size=2)
    seen: list[Node] = []
    for repeat in found:
        first = repeat.regions[0]
        assert repeat.count > 1
        for region in repeat.regions:
            assert len(region.nodes) == repeat.size >= 2
            assert isomorphic(first.nodes, region.nodes)
            assert all(node.next is after for node, after in zip(region.nodes, region.nodes[1:], strict=False))
            seen.extend(region.nodes)
    assert len(set(seen)) == len(seen)
