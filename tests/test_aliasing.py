"""Outputs that alias made safe: golden text, the reasons one by one, and the property over random programs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from passes import CloneAliasedOutputs, PassError, Pipeline, apply
from passes.aliasing import may_overlap
from passes.show import show
from passes.verify import verify

aten = torch.ops.aten
X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)


def trace(function: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*args)


def clones(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.clone.default))


def rewritten(gm: GraphModule, *outputs: int) -> GraphModule:
    return apply(gm, [CloneAliasedOutputs(outputs)])


def cloned_outputs(function: Callable[..., Any], mode: str = "fake") -> list[int]:
    """Which outputs of ``function(X, Y)`` the pass clones when all of them are listed."""
    gm = trace(function, X, Y, mode=mode)
    before = pytree.tree_leaves(gm.graph.output_node().args[0])
    result = rewritten(gm, *range(len(before)))
    after = pytree.tree_leaves(result.graph.output_node().args[0])
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old.name != new.name]


def test_golden_text() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        fresh = x + y
        return x, fresh, (fresh.t(), x.split(1)[1]), y.sum().expand(2), None, y * 2

    gm = trace(program, X, Y)
    before = show(gm)
    result = rewritten(gm, 0, 1, 2, 3, 4, 5, 6)
    assert show(gm) == before
    assert (
        show(result)
        == """\
%x_1 : f32[2, 3] cpu = placeholder
%y_1 : f32[2, 3] cpu = placeholder
%add : f32[2, 3] cpu = aten.add.Tensor(%x_1, %y_1)
%t : f32[3, 2] strides (1, 3) cpu = aten.t.default(%add)
%split : (f32[1, 3] cpu, f32[1, 3] cpu) = aten.split.Tensor(%x_1, 1)
%getitem : f32[1, 3] cpu = operator.getitem(%split, 0)
%getitem_1 : f32[1, 3] cpu = operator.getitem(%split, 1)
%sum_1 : f32[] cpu = aten.sum.default(%y_1)
%expand : f32[2] strides (0,) cpu = aten.expand.default(%sum_1, [2])
%mul : f32[2, 3] cpu = aten.mul.Tensor(%y_1, 2)
%clone_default : f32[2, 3] cpu = aten.clone.default(%x_1)
%clone_default_1 : f32[3, 2] strides (1, 3) cpu = aten.clone.default(%t)
%clone_default_2 : f32[1, 3] cpu = aten.clone.default(%getitem_1)
%clone_default_3 : f32[2] cpu = aten.clone.default(%expand)
return (%clone_default, %add, (%clone_default_1, %clone_default_2), %clone_default_3, None, %mul)"""
    )


FRESH: dict[str, Callable[..., Any]] = {
    "an op": lambda x, y: (x + y,),
    "a view of fresh memory": lambda x, y: ((x + y).t(),),
    "a part of fresh memory": lambda x, y: ((x + y)[0],),
    "a copy of a view": lambda x, y: (x.t().clone(),),
    "several results of one op": lambda x, y: torch.var_mean(x, dim=1),
    "a copied split": lambda x, y: tuple(torch.split_with_sizes_copy(x, [1, 1])),
    "a list of results": lambda x, y: tuple(torch._foreach_add([x, y], 1.0)),
    "an in-place op on fresh memory": lambda x, y: (x.clone().add_(1),),
    "reshape that copies": lambda x, y: (x.t().reshape(-1).clone(),),
}


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("function", FRESH.values(), ids=FRESH.keys())
def test_fresh_outputs_stay_untouched(function: Callable[..., Any], mode: str) -> None:
    assert cloned_outputs(function, mode) == []


ALIASED: dict[str, Callable[..., Any]] = {
    "an input": lambda x, y: (x,),
    "a view of an input": lambda x, y: (x.view(-1),),
    "a chain of views": lambda x, y: (x.t().unsqueeze(0).permute(2, 0, 1)[1:].squeeze(0).detach(),),
    "an alias": lambda x, y: (aten.alias.default(x),),
    "a detached input": lambda x, y: (aten.detach.default(x),),
    "an unsafe view": lambda x, y: (aten._unsafe_view.default(x, [6]),),
    "an aliasing reshape": lambda x, y: (aten._reshape_alias.default(x, [6], [1]),),
    "as_strided": lambda x, y: (x.as_strided((2,), (3,)),),
    "an element of a split": lambda x, y: (x.split(1)[1],),
    "an element of an unbind": lambda x, y: (x.unbind(0)[0],),
    "the diagonal": lambda x, y: (x.diagonal(),),
    "a real view of a complex view": lambda x, y: (torch.view_as_real(torch.view_as_complex(x.view(3, 2))),),
    "an input written in place": lambda x, y: (x.clone().copy_(y), x.add_(1))[1:],
    "a view written in place": lambda x, y: (x[0].mul_(2),),
    "an input written back": lambda x, y: (x.copy_(y),),
    "an expanded fresh value": lambda x, y: ((x + y)[:1].expand(4, 3),),
    "overlapping windows": lambda x, y: ((x + y).view(-1).unfold(0, 3, 1),),
}


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("function", ALIASED.values(), ids=ALIASED.keys())
def test_each_reason_to_clone(function: Callable[..., Any], mode: str) -> None:
    """Real tracing leaves fake values on storages of their own, so that the schemas alone must tell."""
    assert cloned_outputs(function, mode) == [0]


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (z := x + y, z),
        lambda x, y: (z := x + y, z.t()),
        lambda x, y: ((z := x + y)[0], z[1]),
        lambda x, y: (x + y).unbind(0),
        lambda x, y: (z := x + y, z.add_(1)),
        lambda x, y: (v := torch.var_mean(x, dim=1)[0], v.view(1, 2)),
    ],
)
def test_the_first_listed_output_on_a_storage_keeps_it(function: Callable[..., Any], mode: str) -> None:
    assert cloned_outputs(function, mode) == [1]


def test_only_listed_outputs_matter() -> None:
    gm = trace(lambda x, y: (z := x + y, z.t(), x), X, Y)
    assert clones(rewritten(gm)) == 0
    assert clones(rewritten(gm, 1)) == 0
    assert clones(rewritten(gm, 0, 1)) == 1
    assert clones(rewritten(gm, 1, 2)) == 1


def test_an_attribute_is_not_the_graphs_to_hand_out() -> None:
    table = torch.ones(2)
    gm = trace(lambda x: (x + 1, table.view(2)), torch.ones(2), mode="real")
    assert [node.op for node in gm.graph.nodes].count("get_attr") == 1
    assert clones(rewritten(gm, 0, 1)) == 1
    graph = Graph()
    graph.output((graph.get_attr("table"),))
    root = torch.nn.Module()
    root.register_buffer("table", table)
    result = rewritten(GraphModule(root, graph), 0)
    (value,) = result()
    assert value.data_ptr() != table.data_ptr()
    assert torch.equal(value, table)


def test_a_composite_op_may_give_back_its_input() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    kept = graph.call_function(aten.dropout.default, (x, 0.5, False))
    graph.output((kept,))
    with FakeTensorMode():
        x.meta["val"], kept.meta["val"] = torch.empty(2), torch.empty(2)  # values that know nothing of each other
    result = rewritten(GraphModule(torch.nn.Module(), graph), 0)
    assert clones(result) == 1


@torch.library.custom_op("passes_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone(), x.clone()]


def two_values_of_an_opaque_op(first: torch.Tensor, second: torch.Tensor, mode: FakeTensorMode) -> GraphModule:
    """Two getitem nodes on one element of an op whose schema says nothing of aliases."""
    graph = Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.passes_test.opaque.default, (x,))
    one, two = (graph.call_function(operator.getitem, (pair, index)) for index in (0, 1))
    graph.output((one, two))
    with mode:
        x.meta["val"], pair.meta["val"] = torch.empty(2), [torch.empty(2), torch.empty(2)]
    one.meta["val"], two.meta["val"] = first, second
    return GraphModule(torch.nn.Module(), graph)


def test_fake_values_on_one_storage_alias_although_no_schema_says_so() -> None:
    with (mode := FakeTensorMode()):
        value, other = torch.empty(2), torch.empty(2)
        view = value.view(2)
    assert clones(rewritten(two_values_of_an_opaque_op(value, other, mode), 0, 1)) == 0
    assert clones(rewritten(two_values_of_an_opaque_op(value, view, mode), 0, 1)) == 1


def test_an_element_that_is_taken_twice_is_one_value() -> None:
    with (mode := FakeTensorMode()):
        value, other = torch.empty(2), torch.empty(2)
    gm = two_values_of_an_opaque_op(value, other, mode)
    second = gm.graph.find_nodes(op="call_function", target=operator.getitem)[1]
    second.args = (second.args[0], 0)
    gm.recompile()
    assert clones(rewritten(gm, 0, 1)) == 1


def test_an_unlisted_write_into_an_input_is_seen_by_the_clone_as_by_the_alias() -> None:
    gm = trace(lambda x, y: (x.t(), x.copy_(y))[:1], X.clone(), Y)
    gm.graph.lint()
    result = rewritten(gm, 0)
    assert torch.equal(result(X.clone(), Y)[0], Y.t())


@pytest.mark.parametrize(
    ("function", "stride"),
    [
        (lambda x, y: (x.t(),), (1, 3)),
        (lambda x, y: (x[:, :2],), (2, 1)),
        (lambda x, y: (x.t()[:2],), (1, 2)),
        (lambda x, y: (x[:1].expand(4, 3),), (3, 1)),
    ],
)
def test_the_clones_fake_value_has_the_strides_of_the_real_one(function: Callable[..., Any], stride: Any) -> None:
    result = rewritten(trace(function, X, Y), 0)
    (clone,) = result.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert clone.meta["val"].stride() == stride
    assert result(X, Y)[0].stride() == stride


def test_the_clone_carries_the_place_of_what_it_copies() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.t()

    gm = make_fx(forward, tracing_mode="fake", record_stack_traces=True)(X)
    line = forward.__code__.co_firstlineno + 1
    assert f"aten.clone.default(%t)  # test_aliasing.py:{line}" in show(rewritten(gm, 0))


def test_nested_outputs_keep_their_structure() -> None:
    gm = trace(lambda x, y: {"a": [x, None], "b": (3, y.t())}, X, Y)
    given = gm.graph.output_node().args[0]
    taken = rewritten(gm, 0, 1, 2, 3).graph.output_node().args[0]
    assert pytree.tree_structure(given) == pytree.tree_structure(taken)
    assert pytree.tree_leaves(taken)[1:3] == [None, 3]


def test_symbolic_sizes_get_no_guards_and_no_needless_clone() -> None:
    gm = trace(lambda x, y: (x @ y.t(), (x + y).t(), x[0]), X, Y, mode="symbolic")
    environment = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
    before = len(environment.guards)
    result = rewritten(gm, 0, 1, 2)
    assert clones(result) == 1
    assert len(environment.guards) == before


def test_the_joint_graph_of_a_model_that_returns_views() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = torch.relu(self.linear(x))
            return h, h.t(), h.sum().expand(3), x

    with contextlib.ExitStack() as stack:
        gm = aot_export_joint_with_descriptors(stack, Model(), (X,)).graph_module
        before = pytree.tree_leaves(gm.graph.output_node().args[0])
        result = rewritten(gm, *range(len(before)))
    assert verify(result)
    after = pytree.tree_leaves(result.graph.output_node().args[0])
    assert [node.target is aten.clone.default for node in after[:4]] == [False, True, True, True]
    forward_and_gradients = [leaf.meta["val"].untyped_storage()._cdata for leaf in after if leaf is not None]
    assert len(set(forward_and_gradients)) == len(forward_and_gradients) > 4


def test_a_position_that_is_not_an_output_is_named() -> None:
    gm = trace(lambda x, y: (x, y), X, Y)
    with pytest.raises(ValueError, match=r"no outputs at \[2, 5\]: the graph has 2"):
        CloneAliasedOutputs((0, 2, 5))(gm)


def test_a_torch_level_graph_is_refused_with_the_reason() -> None:
    with pytest.raises(PassError, match=r"CloneAliasedOutputs\(outputs=\(0,\)\): the graph is not what") as caught:
        rewritten(symbolic_trace(lambda x: x.view(-1)), 0)
    assert caught.value.stage == "requires"
    assert caught.value.report.ids == ("aten-level", "has-fake-values")


# -- overlap ----------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 3), max_size=3),
    data=st.data(),
)
def test_a_tensor_said_to_be_free_of_overlap_is(sizes: list[int], data: st.DataObject) -> None:
    strides = data.draw(st.lists(st.integers(0, 7), min_size=len(sizes), max_size=len(sizes)))
    value = torch.zeros(64).as_strided(sizes, strides)
    addresses = torch.arange(64).as_strided(sizes, strides).flatten().tolist()
    overlaps = len(set(addresses)) < len(addresses)
    if overlaps:
        assert may_overlap(value)
    if value.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(value):
        assert not may_overlap(value)


# -- property over random programs ------------------------------------------------------------------------------------

STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b.sum(),
    "neg": lambda a, b: -a,
    "view": lambda a, b: a.reshape(-1),
    "transpose": lambda a, b: a.transpose(0, -1) if a.dim() else a,
    "first": lambda a, b: a[:1] if a.dim() else a,
    "detach": lambda a, b: a.detach(),
    "expand": lambda a, b: a.unsqueeze(0).expand(2, *a.shape),
    "split": lambda a, b: a.split(1)[0] if a.dim() else a,
    "in place": lambda a, b: a.clone().mul_(2),
    "write": lambda a, b: a.mul_(2) if not may_overlap(a) else a,
    "cumulate": lambda a, b: torch.cummax(a, 0)[0] if a.dim() else a,
    "unsafe view": lambda a, b: aten._unsafe_view.default(a.contiguous(), [a.numel()]),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[int]]:
    """Steps ``(op, operand, other operand)``, each on earlier values, and which values are returned."""
    steps: list[tuple[str, int, int]] = []
    for position in range(draw(st.integers(1, 8))):
        before = st.integers(0, position + 1)
        steps.append((draw(st.sampled_from(sorted(STEPS))), draw(before), draw(before)))
    outputs = draw(st.lists(st.integers(0, len(steps) + 1), min_size=1, max_size=5))
    return steps, outputs


@given(program=programs(), mode=st.sampled_from(["fake", "real"]))
def test_every_listed_output_owns_its_memory_and_no_value_changes(
    program: tuple[list[tuple[str, int, int]], list[int]], mode: str
) -> None:
    steps, outputs = program

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for name, one, other in steps:
            values.append(STEPS[name](values[one], values[other]))
        return tuple(values[index] for index in outputs)

    gm = make_fx(function, tracing_mode=mode)(X.clone(), Y.clone())
    listed = tuple(range(len(outputs)))
    result = Pipeline((CloneAliasedOutputs(listed),))(gm)
    assert verify(result.graph_module)
    inputs = X.clone(), Y.clone()
    expected, actual = gm(X.clone(), Y.clone()), result.graph_module(*inputs)
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got)
    owners = [tensor.untyped_storage().data_ptr() for tensor in (*actual, *inputs)]
    assert len(set(owners)) == len(owners)
    for tensor, node in zip(actual, result.graph_module.graph.output_node().args[0], strict=True):
        assert not may_overlap(tensor)
        assert tuple(tensor.stride()) == tuple(node.meta["val"].stride())
    assert not Pipeline((CloneAliasedOutputs(listed),))(result.graph_module).modified
