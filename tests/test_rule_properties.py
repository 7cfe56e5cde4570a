"""Each rule over random graphs: a violation that is put into one is always found there, and nothing else ever is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies_fx import KINDS, Program, programs
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from passes import CAPTURABLE, WELL_FORMED, PassError, apply, check
from passes.capturable_collectives import Collective
from passes.verify import verify
from passes.verify_calls import CurrentFakeValue

aten = torch.ops.aten
functional = torch.ops._c10d_functional
GROUPS = {"stream": "nccl", "host": "gloo"}
RULES = tuple(Collective(backend_of=GROUPS.get) if rule.id == "collective" else rule for rule in CAPTURABLE)
HALF = settings(max_examples=settings().max_examples // 2)  # for the tests of one rule each


@torch.library.custom_op("passes_test::rule_unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def rule_unsafe(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@rule_unsafe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("passes_test::rule_safe", mutates_args=())
def rule_safe(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@rule_safe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("passes_test::rule_real_only", mutates_args=())
def rule_real_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Odd(torch.Tensor):
    """A subclass that no tracer takes apart."""


Insert = Callable[[torch.fx.Graph, Node], Node]


def op(target: Any, *more: Any, val: Callable[[Any], Any] | None = None, **options: Any) -> Insert:
    """A call of ``target`` on the node, with a value made of the node's, or without one."""

    def insert(graph: torch.fx.Graph, node: Node) -> Node:
        given = {}
        for key, value in options.items():
            given[key] = value
            if isinstance(value, torch.Generator):
                setattr(graph.owning_module, key, value)
                given[key] = graph.create_node("get_attr", key)  # get_attr() warns about what is no tensor
        call = graph.call_function(target, (node, *more), given)
        if val is not None:
            call.meta["val"] = val(node.meta["val"])
        return call

    return insert


def alike(value: Any) -> Any:
    """A fake value of the same metadata."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def odd(value: Any) -> Any:
    return torch.empty(value.shape).as_subclass(Odd)


def sparse(value: Any) -> Any:
    return torch.zeros(2, 2).to_sparse()


# Rule -> what violates it, and what comes next to that without doing so.
CAPTURE: dict[str, tuple[list[Insert], list[Insert]]] = {
    "host-sync": (
        [
            op(aten.item.default),
            op(aten._local_scalar_dense.default),
            op(aten.equal.default, 1),
            op(torch.Tensor.tolist),
        ],
        [op(aten.sum.default, val=alike), op(aten.eq.Scalar, 1, val=alike)],
    ),
    "data-dependent-shape": (
        [op(aten.nonzero.default), op(aten._unique2.default), op(aten.bincount.default)],
        [op(aten.nonzero_static.default, size=3, val=alike), op(aten.sort.default)],
    ),
    "cudagraph-unsafe-op": (
        [op(torch.ops.passes_test.rule_unsafe.default, val=alike)],
        [op(torch.ops.passes_test.rule_safe.default, val=alike)],
    ),
    "higher-order-op": (
        [op(torch.ops.higher_order.cond, None, None, ())],
        [op(torch.ops.higher_order.auto_functionalized)],
    ),
    "unregistered-generator": (
        [op(aten.bernoulli.default, generator=torch.Generator(), val=alike)],
        [
            op(aten.bernoulli.default, generator=torch.default_generator, val=alike),
            op(aten.bernoulli.default, val=alike),
        ],
    ),
    "no-fake-impl": (
        [op(torch.ops.passes_test.rule_real_only.default)],
        [op(torch.ops.passes_test.rule_safe.default, val=alike)],
    ),
    "unsupported-layout": (
        [op(aten._to_sparse.default), op(aten.neg.default, val=sparse), op(aten.to_mkldnn.default)],
        [op(aten.to_dense.default, val=alike)],
    ),
    "tensor-subclass": ([op(aten.neg.default, val=odd)], [op(aten.neg.default, val=alike)]),
    "collective": (
        [op(dist.barrier), *(op(functional.all_reduce.default, "sum", name, val=alike) for name in ("host", "?"))],
        [op(functional.all_reduce.default, "sum", "stream", val=alike)],
    ),
    "print-side-effect": ([op(print), op(aten._print.default)], [op(aten._assert_async.default)]),
}


def tensors(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if isinstance(node.meta.get("val"), FakeTensor)]


def put(gm: GraphModule, insert: Insert, choice: int) -> Node:
    """Insert a call that reads a chosen value, right behind it or behind the placeholders."""
    node = tensors(gm)[choice % len(tensors(gm))]
    last = [*gm.graph.find_nodes(op="placeholder")][-1]
    with gm.graph.inserting_after(last if node.op == "placeholder" else node):
        return insert(gm.graph, node)


def test_every_rule_has_its_rows() -> None:
    assert {*CAPTURE, "several-devices"} == {rule.id for rule in CAPTURABLE}
    assert set(CORRUPTIONS) == {rule.id for rule in WELL_FORMED}


@given(program=programs())
def test_no_rule_speaks_up_about_an_ordinary_program(program: Program) -> None:
    gm = program.trace()
    assert str(check(gm)) == "no violations"
    assert str(verify(gm)) == "no violations"


@HALF
@pytest.mark.parametrize("rule", CAPTURE)
@given(program=programs(max_lines=5), choice=st.integers(0, 20), which=st.integers(0, 3))
def test_what_cannot_be_captured_is_found_where_it_stands(rule: str, program: Program, choice: int, which: int) -> None:
    bad, good = CAPTURE[rule]
    gm = program.trace()
    node = put(gm, bad[which % len(bad)], choice)
    found = check(gm, RULES).violations
    assert [(violation.id, violation.where.node) for violation in found] == [(rule, node.name)]
    gm = program.trace()
    put(gm, good[which % len(good)], choice)
    assert str(check(gm, RULES)) == "no violations"


@given(program=programs(kinds=("arithmetic", "reductions", "views", "random")), choice=st.integers(0, 20))
def test_a_value_on_another_device_is_found_with_all_that_touches_it(program: Program, choice: int) -> None:
    gm = program.trace()
    calls = [node for node in tensors(gm) if node.op == "call_function" and "_to_copy" not in str(node.target)]
    assume(calls)
    for node in gm.graph.nodes:  # the same program on a GPU, as far as the graph can tell
        if node in tensors(gm):
            node.meta["val"] = on(node.meta["val"], "cuda:0")
        elif isinstance(node.meta.get("val"), (tuple, list)):
            node.meta["val"] = [on(value, "cuda:0") for value in node.meta["val"]]
    assert str(check(gm)) == "no violations"
    stray = calls[choice % len(calls)]
    stray.meta["val"] = on(stray.meta["val"], "cpu")
    expected = [node.name for node in gm.graph.nodes if node is stray or (node in stray.users and node.op != "output")]
    only_one = len(tensors(gm)) == 1
    found = check(gm).violations
    assert only_one or [(violation.id, violation.where.node) for violation in found] == [
        ("several-devices", name) for name in expected
    ]


def on(value: Any, device: str) -> Any:
    with value.fake_mode:
        return aten.empty_strided.default(value.shape, value.stride(), dtype=value.dtype, device=torch.device(device))


# -- well-formedness --------------------------------------------------------------------------------------------------


def swap_order(gm: GraphModule, choice: int) -> None:
    pairs = [(node, user) for node in gm.graph.nodes for user in node.users if node.op == user.op == "call_function"]
    assume(pairs)
    source, user = pairs[choice % len(pairs)]
    user.append(source)
    gm.recompile()


def late_placeholder(gm: GraphModule, choice: int) -> None:
    calls = calls_of(gm)
    with gm.graph.inserting_after(calls[choice % len(calls)]):
        gm.graph.placeholder("late")
    gm.recompile()


def calls_of(gm: GraphModule) -> list[Node]:
    found = [node for node in gm.graph.nodes if node.op == "call_function"]
    assume(found)
    return found


def node_behind_the_output(gm: GraphModule, choice: int) -> None:
    with gm.graph.inserting_after(gm.graph.output_node()):
        gm.graph.call_function(operator.not_, (True,)).meta["val"] = False
    gm.recompile()


def no_value(gm: GraphModule, choice: int) -> None:
    known = [
        node
        for node in calls_of(gm)
        if node.all_input_nodes
        and all("val" in source.meta for source in node.all_input_nodes)
        and (node.users or not node.target._schema.is_mutable)  # a write-back need not have one
    ]
    assume(known)
    del known[choice % len(known)].meta["val"]


def early_write_back(gm: GraphModule, choice: int) -> None:
    pairs = [
        (node, user)
        for node in gm.graph.find_nodes(op="placeholder")
        for user in node.users
        if user.op == "call_function"
    ]
    assume(pairs)
    node, user = pairs[choice % len(pairs)]
    with gm.graph.inserting_before(user):
        written: Any = ([node], [node]) if choice % 2 else (node, node)
        target = aten._foreach_copy_.default if choice % 2 else aten.copy_.default
        gm.graph.call_function(target, written).meta["val"] = node.meta["val"]
    gm.recompile()


def stale_code(gm: GraphModule, choice: int) -> None:
    call = calls_of(gm)[0]
    with gm.graph.inserting_after(call):
        gm.graph.call_function(operator.not_, (True,)).meta["val"] = False


def misfit(gm: GraphModule, choice: int) -> None:
    call = next(node for node in calls_of(gm) if isinstance(node.target, OpOverload))
    declared = call.target._schema.arguments
    if choice % 3 == 0:
        call.args = (*call.args, *(None for _ in declared))
    elif choice % 3 == 1:
        call.kwargs = {**call.kwargs, "no_such_argument": 1}
    else:
        required = [k for k, one in enumerate(declared) if not one.has_default_value() and not one.kwarg_only]
        assume(required)
        call.args = call.args[: required[-1]]
    gm.recompile()


CORRUPTIONS: dict[str, Callable[[GraphModule, int], None]] = {
    "lint": swap_order,
    "fits-schema": misfit,
    "placeholders-first": late_placeholder,
    "one-output": node_behind_the_output,
    "missing-fake-value": no_value,
    "read-after-write-back": early_write_back,
    "recompiled": stale_code,
}


@HALF
@pytest.mark.parametrize("rule", CORRUPTIONS)
@given(program=programs(kinds=tuple(kind for kind in KINDS if kind != "in place")), choice=st.integers(0, 20))
def test_what_is_malformed_is_found(rule: str, program: Program, choice: int) -> None:
    gm = program.trace()
    CORRUPTIONS[rule](gm, choice)
    assert rule in verify(gm).ids
    assert set(verify(gm).ids) <= {rule, "lint"}  # torch's own check may see more


@given(program=programs())
def test_the_values_of_an_ordinary_program_are_what_its_calls_give(program: Program) -> None:
    gm = program.trace()
    assert list(CurrentFakeValue().violations(gm)) == []


REPLACEMENTS: tuple[tuple[OpOverload, tuple[Any, ...]], ...] = (
    (aten.sum.default, ()),  # other sizes
    (aten.unsqueeze.default, (0,)),
    (aten.isnan.default, ()),  # another dtype
    (aten.expand.default, ([2, *[-1] * 8],)),  # fails: too many dimensions
)


@given(program=programs(), choice=st.integers(0, 20), which=st.integers(0, len(REPLACEMENTS) - 1))
def test_a_pass_that_leaves_the_value_of_another_call_is_named(program: Program, choice: int, which: int) -> None:
    target, more = REPLACEMENTS[which]
    gm = program.trace()
    found = [
        node
        for node in tensors(gm)
        if isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and isinstance(value := node.meta["val"], FakeTensor)
        and node.args
        and node.args[0] in tensors(gm)
        and (value.dim(), value.dtype) != (0, torch.bool)
    ]
    assume(found)
    name = found[choice % len(found)].name

    def replace(graph_module: GraphModule) -> None:
        node = next(node for node in graph_module.graph.nodes if node.name == name)
        node.target, node.args, node.kwargs = target, (node.args[0], *more), {}
        graph_module.recompile()

    given = found[choice % len(found)].args[0].meta["val"]
    kept = found[choice % len(found)].meta["val"]
    try:
        with given.fake_mode:
            right = target(given, *more)
    except RuntimeError:
        right = None
    same = right is not None and (right.shape, right.stride(), right.dtype) == (kept.shape, kept.stride(), kept.dtype)
    if same:
        apply(gm, [replace])
        return
    with pytest.raises(PassError) as caught:
        apply(gm, [replace])
    assert [(one.id, one.where.node) for one in caught.value.report.violations] == [("stale-fake-value", name)]
