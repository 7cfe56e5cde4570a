"""passes/device_constants.py: constants leave the CPU. The graphs are of fake CUDA tensors, which need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes import MoveConstantsToDevice, Pipeline, RemoveDeadCode, apply, check
from passes.device_constants import _fits
from passes.show import show

aten = torch.ops.aten


def trace(function: Callable[..., Any], dtype: torch.dtype = torch.float32, **tables: torch.Tensor) -> GraphModule:
    """The graph on a CUDA tensor of 2 x 3; keyword arguments are attributes, and further arguments, of the graph."""
    with FakeTensorMode() as mode:
        x = torch.empty(2, 3, device="cuda:0", dtype=dtype)
        gm = make_fx(function, tracing_mode="real")(x, *map(mode.from_tensor, tables.values()))
    placeholders = gm.graph.find_nodes(op="placeholder")[1:]
    for node, (name, table) in zip(placeholders, tables.items(), strict=True):
        gm.register_buffer(name, table)
        with gm.graph.inserting_before(node):
            attribute = gm.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def lifted(value: Any) -> Any:
    """``torch.tensor(value)`` as Dynamo and export leave it in a graph."""
    return aten.lift_fresh_copy(value)


def moved(gm: GraphModule, *attributes: str) -> GraphModule:
    one = MoveConstantsToDevice(attributes)
    result = apply(gm, [one])
    assert not Pipeline((one,))(result).modified
    return apply(result, [RemoveDeadCode()])


def test_golden_text() -> None:
    def program(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        scaled = x * lifted(factor) + torch.full((), 3.0)
        ones = torch.ones(2, dtype=torch.int64)
        return aten.index(scaled, [None, torch.arange(2)]) + aten._to_copy(ones, dtype=torch.float32, device="cuda:0")

    gm = trace(program, factor=torch.tensor(0.5))
    assert set(check(gm).ids) == {"several-devices", "host-sync"}
    result = moved(gm)
    text = show(result)
    assert (
        text.replace("device(type='cuda', index=0)", "cuda")
        == """\
%x_1 : f32[2, 3] cuda:0 = placeholder
%mul : f32[2, 3] cuda:0 = aten.mul.Tensor(%x_1, 0.5)
%add : f32[2, 3] cuda:0 = aten.add.Tensor(%mul, 3.0)
%ones_default : i64[2] cuda:0 = aten.ones.default([2], dtype=torch.int64, device=cuda)
%_to_copy_default : f32[2] cuda:0 = aten._to_copy.default(%ones_default, dtype=torch.float32)
%arange_default : i64[2] cuda:0 = aten.arange.default(2, device=cuda, dtype=torch.int64)
%index : f32[2, 2] cuda:0 = aten.index.Tensor(%add, [None, %arange_default])
%add_1 : f32[2, 2] cuda:0 = aten.add.Tensor(%index, %_to_copy_default)
return %add_1"""
    )
    assert check(result)


def number_in(gm: GraphModule) -> Any:
    """The number that the one operator on the device takes, or None if it takes a tensor."""
    operators = (aten.mul.Tensor, aten.add_.Tensor, aten.div.Tensor)
    (call,) = (node for node in gm.graph.nodes if node.target in operators and node.meta["val"].is_cuda)
    return None if isinstance(call.args[1], torch.fx.Node) else call.args[1]


NUMBERS: dict[str, tuple[Any, torch.dtype, Callable[..., Any]]] = {
    "full": (2.5, torch.float32, lambda x: x * torch.full((), 2.5)),
    "a rounded one": (torch.tensor(0.1).item(), torch.float32, lambda x: x * torch.full((), 0.1)),
    "scalar_tensor": (2.0, torch.float32, lambda x: x * torch.scalar_tensor(2)),
    "zeros": (0.0, torch.float32, lambda x: x * torch.zeros(())),
    "ones": (1, torch.int64, lambda x: x * torch.ones((), dtype=torch.int64)),
    "in place": (2.0, torch.float32, lambda x: x.add_(torch.full((), 2.0))),
    "half precision": (2.5, torch.float16, lambda x: x / torch.full((), 2.5)),
    "a whole number for whole numbers": (2, torch.int32, lambda x: x * torch.full((), 2)),
    "would change the dtype": (None, torch.int64, lambda x: x * torch.full((), 2.5, dtype=torch.float64)),
    "on the left": (2.5, torch.float32, lambda x: torch.full((), 2.5) * x),
    "on the left of what does not commute": (None, torch.float32, lambda x: torch.full((), 2.5) / x),
    "computed on the CPU": (8.0, torch.float32, lambda x: x / torch.full((), 64.0).sqrt()),
    "computed of several": (
        3.0,
        torch.float32,
        lambda x: x * torch.stack([torch.full((), 3.0), torch.ones(())]).amax(),
    ),
    "drawn on the CPU": (None, torch.float32, lambda x: x * torch.rand(()).sqrt()),
    "memory as it was found": (None, torch.float32, lambda x: x * torch.empty(()).sqrt()),
    "written": (None, torch.float32, lambda x: x * torch.full((), 2.5).add_(1)),
    "written through a view": (None, torch.float32, lambda x: ((c := torch.ones(())).view(1).add_(1), x * c)[1]),
    "not a scalar": (None, torch.float32, lambda x: x * torch.full((1,), 2.5, device="cuda:0")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_scalars_become_numbers_where_no_bit_changes(name: str) -> None:
    expected, dtype, function = NUMBERS[name]
    gm = trace(function, dtype)
    result = moved(gm)
    assert (number_in(result), type(number_in(result))) == (expected, type(expected))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(2, 3, device="cuda:0", dtype=dtype)
        assert (result(x).dtype, result(x).device) == (gm(x).dtype, gm(x).device)
    assert mode is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_other_operators_that_take_a_number(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> Any:
        return x > torch.full((), 2.0), x.masked_fill(x == torch.zeros((), dtype=dtype), torch.full((), 1.5))

    result = moved(trace(program, dtype))
    assert check(result)
    called = [node.target for node in result.graph.nodes if node.op == "call_function"]
    assert called == [aten.gt.Scalar, aten.eq.Scalar, aten.masked_fill.Scalar]


COPIES: dict[str, tuple[torch.dtype, torch.Tensor, bool]] = {
    "a whole number": (torch.float32, torch.tensor(1), True),
    "of another precision": (torch.float16, torch.tensor(0.1), True),
    "too large for it": (torch.float16, torch.tensor(1e6), False),
    "infinite": (torch.float16, torch.tensor(float("inf")), True),
    "a fraction for whole numbers": (torch.int64, torch.tensor(1.5), False),
    "too large for whole numbers": (torch.int8, torch.tensor(300), False),
    "a whole number for whole numbers": (torch.int8, torch.tensor(30), True),
    "a number for flags": (torch.bool, torch.tensor(2), False),
    "a flag for flags": (torch.bool, torch.tensor(True), True),
    "a complex one": (torch.float32, torch.tensor(1j), False),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copied_scalar_becomes_a_fill_where_it_casts_the_same(name: str) -> None:
    dtype, constant, is_number = COPIES[name]

    def program(x: torch.Tensor, number: torch.Tensor) -> Any:
        return aten.select_scatter(x, aten.copy(aten.select(x, 0, 0), lifted(number)), 0, 0)

    gm = trace(program, dtype, number=constant)
    result = moved(gm)
    assert bool(result.graph.find_nodes(op="call_function", target=aten.fill.Scalar)) == is_number
    assert bool(check(result)) == is_number


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_a_fill_takes_its_number_as_such(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor, number: torch.Tensor) -> Any:
        return aten.select_scatter(x, aten.fill(aten.select(x, 0, 0), lifted(number)), 0, 0)

    result = moved(trace(program, dtype, number=torch.tensor(2.5)))
    assert check(result)
    (call,) = result.graph.find_nodes(op="call_function", target=aten.fill.Scalar)
    assert call.args[1] == 2.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool])
@given(number=st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans()))
def test_such_a_fill_has_the_bits_of_the_copy(dtype: torch.dtype, number: Any) -> None:
    constant = torch.tensor(number)
    if _fits(constant.item(), constant.dtype, dtype):
        copied, filled = (
            aten.copy(torch.ones(2, dtype=dtype), constant),
            aten.fill(torch.ones(2, dtype=dtype), constant.item()),
        )
        assert torch.equal(copied.view(torch.uint8), filled.view(torch.uint8))


def test_a_comparison_in_another_precision_keeps_its_tensor() -> None:
    gm = trace(lambda x: x > torch.full((), 0.1, dtype=torch.float64), torch.int64)
    assert not Pipeline((MoveConstantsToDevice(),))(gm).modified


def test_where_takes_its_scalars_from_the_device() -> None:
    gm = trace(lambda x: aten.where(x > 0, x, torch.full((), -3.5)))
    result = moved(gm)
    assert check(result)
    (full,) = result.graph.find_nodes(op="call_function", target=aten.full.default)
    assert full.meta["val"].is_cuda


@pytest.mark.cuda
def test_on_a_gpu_what_is_computed_on_the_cpu_keeps_its_bits() -> None:
    def program(x: torch.Tensor, number: torch.Tensor) -> Any:
        least = lifted(number).exp()
        table = aten._to_copy(torch.linspace(0, 1, 3).exp(), device="cuda:0")
        return aten.where(x > 0, x, least), x + table, x / torch.full((), 7.0).sqrt(), x >= least

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gm = trace(program, dtype, number=torch.tensor(-0.3))
        result = moved(gm)
        assert check(result)
        x = torch.randn(2, 3, device="cuda:0").to(dtype)
        for before, after in zip(gm(x), result(x), strict=True):
            assert before.dtype == after.dtype
            assert torch.equal(before, after)


def test_state_is_no_constant_unless_the_caller_says_so() -> None:
    gm = trace(lambda x, scale: x * scale, scale=torch.tensor(0.5))
    assert number_in(moved(gm)) is None
    assert number_in(moved(gm, "scale")) == 0.5
    written = trace(lambda x, scale: (scale.add_(1), x * scale)[1], scale=torch.tensor(0.5))
    assert not Pipeline((MoveConstantsToDevice(("scale",)),))(written).modified


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_on_a_gpu_every_bit_stays_and_a_table_is_copied_once(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor, table: torch.Tensor, number: torch.Tensor) -> Any:
        columns = aten.index(x, [None, torch.arange(3)])
        return columns * lifted(number) + aten._to_copy(lifted(table), device="cuda:0"), x / torch.full((), 0.1)

    tables = {"table": torch.arange(3), "number": torch.tensor(0.1, dtype=torch.float64).to(dtype)}
    gm = trace(program, dtype, **tables)
    result = moved(gm)
    assert check(result)
    assert any(name.endswith("_on_cuda") for name, _ in result.named_buffers())
    x = torch.randn(2, 3, device="cuda:0").to(dtype)
    for before, after in zip(gm(x), result(x), strict=True):
        assert torch.equal(before, after)


def test_a_graph_on_one_device_is_left_alone() -> None:
    gm = make_fx(lambda x: x * torch.full((), 2.0) + torch.ones(3), tracing_mode="fake")(torch.ones(3))
    assert not Pipeline((MoveConstantsToDevice(),))(gm).modified


def test_random_numbers_stay_where_they_are_drawn() -> None:
    for function in (
        lambda x: x + aten._to_copy(torch.rand(3), device="cuda:0"),
        lambda x: x + aten._to_copy(torch.rand(3).exp(), device="cuda:0"),
    ):
        assert not Pipeline((MoveConstantsToDevice(),))(trace(function)).modified


def test_what_is_large_is_not_computed_while_the_graph_is_rewritten() -> None:
    gm = trace(lambda x: x + aten._to_copy(torch.linspace(0, 1, 5000)[:3], device="cuda:0"))
    assert not Pipeline((MoveConstantsToDevice(),))(gm).modified


MASKED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "whole": lambda x, n: aten.index_put(x, [x > 0], n),
    "in place": lambda x, n: aten.index_put_(x * 2, [x > 0], n),
    "rows": lambda x, n: aten.index_put(x, [aten.select(x, 1, 0) > 0], n),
    "columns": lambda x, n: aten.index_put(x, [None, aten.select(x, 0, 0) > 0], n),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_number_that_is_written_by_a_mask_becomes_that_of_a_masked_fill(name: str) -> None:
    def program(x: torch.Tensor, number: torch.Tensor) -> Any:
        return MASKED[name](x, lifted(number))

    gm = trace(program, number=torch.tensor(0.5))
    assert set(check(gm).ids) == {"several-devices"}  # the mask is no reason: the kernels fill
    result = moved(gm)
    assert check(result)
    fills = [node for node in result.graph.nodes if node.target in (aten.masked_fill.Scalar, aten.masked_fill_.Scalar)]
    assert [node.args[2] for node in fills] == [0.5]
    for node in result.graph.nodes:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
    result.recompile()
    x = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 5.0, -0.0]])
    assert torch.equal(result(x.clone()), program(x.clone(), torch.tensor(0.5)))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, n: aten.index_put(x, [x > 0], n, True),  # accumulated
        lambda x, n: aten.index_put(x, [x > 0], x.sum()),  # a value of the device
    ],
)
def test_other_writes_by_a_mask_look_for_its_true_entries(program: Callable[..., Any]) -> None:
    gm = trace(lambda x, n: program(x, lifted(n)), n=torch.tensor(0.5))
    assert "data-dependent-shape" in check(gm).ids
    assert "data-dependent-shape" in check(moved(gm)).ids


def test_a_masked_fill_that_would_have_other_strides_is_left() -> None:
    def program(x: torch.Tensor, number: torch.Tensor) -> Any:
        x = x.t()
        return aten.index_put(x, [x > 0], lifted(number))

    result = moved(trace(program, number=torch.tensor(0.5)))
    assert result.graph.find_nodes(op="call_function", target=aten.index_put.default)
