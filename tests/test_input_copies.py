"""passes/input_copies.py: write-backs become one operator where it may stand in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes import MergeInputCopies, Pipeline, apply
from passes.show import show
from passes.verify import verify

aten = torch.ops.aten


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.arange(3.0), torch.arange(3.0, 6.0), torch.arange(4)


def trace(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs())


def test_golden_text() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        more, count = x + y, n + 1
        x.copy_(more)
        n.copy_(count)
        y.copy_(more)
        return more * 2

    gm = trace(program)
    result = apply(gm, [MergeInputCopies()])
    assert (
        show(result)
        == """\
%x_1 : f32[3] cpu = placeholder
%y_1 : f32[3] cpu = placeholder
%n_1 : i64[4] cpu = placeholder
%add : f32[3] cpu = aten.add.Tensor(%x_1, %y_1)
%add_1 : i64[4] cpu = aten.add.Tensor(%n_1, 1)
%copy__1 : i64[4] cpu = aten.copy_.default(%n_1, %add_1)
%_foreach_copy__default = aten._foreach_copy_.default([%x_1, %y_1], [%add, %add])
%mul : f32[3] cpu = aten.mul.Tensor(%add, 2)
return %mul"""
    )
    before, after = inputs(), inputs()
    assert torch.equal(gm(*before), result(*after))
    assert all(map(torch.equal, before, after))
    assert not Pipeline((MergeInputCopies(),))(result).modified


def groups(function: Callable[..., Any]) -> list[int]:
    """The numbers of copies in the merged operators."""
    result = apply(trace(function), [MergeInputCopies()])
    merged = result.graph.find_nodes(op="call_function", target=aten._foreach_copy_.default)
    return [len(node.args[0]) for node in merged]


CASES: dict[str, tuple[list[int], Callable[..., Any]]] = {
    "one alone": ([], lambda x, y, n: (x.copy_(y + 1), 3)[1]),
    "a cast in one of them": ([], lambda x, y, n: (x.copy_((n[:3] + 1).double()), y.copy_(n[:3] + 1.5), 3)[2]),
    "the same cast in both": (
        [2],
        lambda x, y, n: ((a := (n[:3] + 1).double()), x.copy_(a), y.copy_(a), 3)[3],
    ),
    "another dtype in between": (
        [2],
        lambda x, y, n: ((a := n[:3] + 1.5), x.copy_(a), n.copy_(n + 1), y.copy_(a), 3)[4],
    ),
    "a source that another dtype's copy writes": (
        [],
        lambda x, y, n: (x.copy_(y + 1), n[:3].copy_(x), y.copy_(n[:3]), 3)[3],
    ),
    "a source that is another's target": ([], lambda x, y, n: (x.copy_(y), y.copy_(x + 1), 3)[2]),
    "a target that is an earlier one's source": ([], lambda x, y, n: (x.copy_(y), y.copy_(n[:3]), 3)[2]),
    "a swap through memory of its own": (
        [2],
        lambda x, y, n: ((a := x.clone()), (b := y.clone()), x.copy_(b), y.copy_(a), 3)[4],
    ),
    "the same target twice": ([], lambda x, y, n: (x.copy_(n[:3] + 1), x.copy_(n[:3] + 2), 3)[2]),
    "a target that is read in between": (
        [],
        lambda x, y, n: ((a := x + 1), x.copy_(a), (b := x * 2), y.copy_(b), 3)[4],
    ),
    "a source that is written in between": (
        [],
        lambda x, y, n: ((a := x + 1), x.copy_(a), a.add_(1), y.copy_(n[:3].float()), 3)[4],
    ),
    "a broadcast": ([], lambda x, y, n: (x.copy_(y.sum()), y.copy_(n.sum()), 3)[2]),
    "a result that is used": ([], lambda x, y, n: (x.copy_(n[:3] + 1).mul_(2), y.copy_(n[:3] + 2), 3)[2]),
    "a view of an input as target": ([], lambda x, y, n: (x[:2].copy_(n[:2]), y[:2].copy_(n[:2]), 3)[2]),
}


def test_a_write_into_a_source_ends_a_group_and_the_next_one_begins() -> None:
    def program(*values: torch.Tensor) -> None:
        first, second = values[0] + 1, values[1] + 1
        values[0].copy_(first)
        values[1].copy_(first)
        first.add_(second)
        values[2].copy_(first)
        values[3].copy_(second)

    gm = make_fx(program, tracing_mode="fake")(*(torch.ones(2) for _ in range(4)))
    result = apply(gm, [MergeInputCopies()])
    merged = result.graph.find_nodes(op="call_function", target=aten._foreach_copy_.default)
    places = {node: place for place, node in enumerate(result.graph.find_nodes(op="placeholder"))}
    assert [[places[target] for target in node.args[0]] for node in merged] == [[0, 1], [2, 3]]
    before, after = ([torch.full((2,), float(index)) for index in range(4)] for _ in range(2))
    gm(*before)
    result(*after)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", CASES)
def test_which_are_merged(name: str) -> None:
    expected, function = CASES[name]
    assert groups(function) == expected
    gm = trace(function)
    before, after = inputs(), inputs()
    gm(*before)
    apply(gm, [MergeInputCopies()])(*after)
    assert all(map(torch.equal, before, after))


def test_a_read_behind_a_merged_write_back_is_found_by_the_verifier() -> None:
    result = apply(trace(lambda x, y, n: (x.copy_(n[:3]), y.copy_(n[1:]), n * 2)[2]), [MergeInputCopies()])
    assert verify(result)
    output = result.graph.output_node()
    with result.graph.inserting_before(output):
        late = result.graph.call_function(aten.neg.default, (next(iter(result.graph.nodes)),))
    late.meta["val"] = next(iter(result.graph.nodes)).meta["val"]
    output.args = (late,)
    result.recompile()
    (violation,) = verify(result).violations
    assert (violation.id, violation.observed) == (
        "read-after-write-back",
        "neg_default reads x_1 after _foreach_copy__default wrote it",
    )
