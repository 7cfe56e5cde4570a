"""What can be held in a CUDA graph.

Each rule's smallest violation, nearest non-violation and exact message; the variants of each reason at torch level and
at ATen level; and torch's own knowledge as a lower bound.
"""

from __future__ import annotations

import inspect
import operator
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._inductor import utils as inductor_utils
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from passes import CAPTURABLE, NodeConstraint, check, op_lists
from passes.capturable_collectives import Collective, backend_of_group
from passes.capturable_ops import UnregisteredGenerator

aten = torch.ops.aten
RULES = {rule.id: rule for rule in CAPTURABLE}
FAKE = FakeTensorMode()


@torch.library.custom_op("passes_test::real_only", mutates_args=())
def real_only(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("passes_test::with_fake", mutates_args=())
def with_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@with_fake.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("passes_test::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unsafe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("fxgraph_tests", "FRAGMENT")
_LIBRARY.define("same_generator(Generator generator) -> Generator")
_LIBRARY.impl("same_generator", lambda generator: generator, "CompositeImplicitAutograd")


class Marked(torch.Tensor):
    pass


def fake(*sizes: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FAKE:
        return torch.empty(sizes, device=device, dtype=dtype)


def by_hand(target: Any, *inputs: Any, result: Any = None, method: bool = False, **options: Any) -> GraphModule:
    """One call on placeholders that carry ``inputs`` as values where these are tensors; others are constants."""
    graph = Graph()
    arguments: list[Any] = []
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{index}")
            node.meta["val"] = value
            arguments.append(node)
        else:
            arguments.append(value)
    root = torch.nn.Module()
    for key, value in options.items():
        if isinstance(value, (torch.Generator, dist.ProcessGroup)):
            setattr(root, key, value)
            options[key] = graph.get_attr(key)
    create = graph.call_method if method else graph.call_function
    call = create(target, tuple(arguments), options)
    if result is not None:
        call.meta["val"] = result
    graph.output(call)
    return GraphModule(root, graph)


def torch_level(forward: Callable[..., Any]) -> GraphModule:
    """Symbolic tracing with places; the function must be called forward, which is what torch.fx looks for."""
    tracer = Tracer()
    tracer.record_stack_traces = True
    return GraphModule(torch.nn.Module(), tracer.trace(forward))


def aten_level(function: Callable[..., Any], *args: Any) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic", record_stack_traces=True)(*args)


def ids(gm: GraphModule) -> tuple[str, ...]:
    return check(gm).ids


# -- triples ----------------------------------------------------------------------------------------------------------


def _item() -> tuple[GraphModule, GraphModule, str]:
    def forward(x: Any) -> Any:
        return x.sum().item()

    message = f"""
        [host-sync] an op makes the host wait for the device
          where:    node item, {__file__}:{forward.__code__.co_firstlineno + 1}
          observed: Tensor.item reads a value on the host
          expected: an op that reads and writes the device only
          hint:     keep the value as a tensor on the device (torch.where instead of if), or take it out of the region
        """
    bad = torch_level(forward)

    def forward(x: Any) -> Any:  # type: ignore[no-redef]
        return x.sum().clone()

    return bad, torch_level(forward), message


def _mask() -> tuple[GraphModule, GraphModule, str]:
    def forward(x: Any) -> Any:
        return x[x > 0]

    message = f"""
        [data-dependent-shape] an op's output shape depends on values
          where:    node index, {__file__}:{forward.__code__.co_firstlineno + 1}
          observed: aten.index.Tensor with the boolean mask gt
          expected: an output shape that follows from the input shapes
          hint:     {RULES["data-dependent-shape"].hint}
        """
    bad = aten_level(forward, torch.ones(3))

    def forward(x: Any) -> Any:  # type: ignore[no-redef]
        return x[(x > 0).long()]

    return bad, aten_level(forward, torch.ones(3)), message


def _devices() -> tuple[GraphModule, GraphModule, str]:
    cuda, scalar = fake(2, device="cuda:0"), fake()
    bad = by_hand(aten.mul.Tensor, cuda, scalar, result=cuda)
    good = by_hand(aten.mul.Tensor, cuda, 2.0, result=cuda)
    message = """
        [several-devices] tensors are on several devices
          where:    node mul_tensor
          observed: aten.mul.Tensor on cuda:0: x0, its result; cpu: x1
          expected: everything on cuda:0
          hint:     create or move every tensor on one device; pass a number instead of a 0-dim CPU tensor
        """
    return bad, good, message


def _unsafe() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(torch.ops.passes_test.unsafe.default, fake(2), result=fake(2))
    good = by_hand(torch.ops.passes_test.with_fake.default, fake(2), result=fake(2))
    message = """
        [cudagraph-unsafe-op] an op is known as unsafe in a CUDA graph
          where:    node unsafe_default
          observed: passes_test.unsafe.default carries the tag cudagraph_unsafe
          expected: an op without the tag torch.Tag.cudagraph_unsafe that torch does not list as forbidden
          hint:     replace the op, or take it out of the region
        """
    return bad, good, message


def _higher_order() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(torch.ops.higher_order.cond, fake(), None, None, ())
    good = by_hand(torch.ops.higher_order.auto_functionalized, torch.ops.passes_test.with_fake.default)
    message = """
        [higher-order-op] an op runs a function or a sub-graph
          where:    node cond
          observed: torch.ops.higher_order.cond
          expected: an operator on tensors
          hint:     inline the sub-graph, or write the branch with torch.where
        """
    return bad, good, message


def _generator() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(aten.bernoulli.default, fake(2), generator=torch.Generator())
    good = by_hand(aten.bernoulli.default, fake(2), generator=torch.default_generator)
    message = """
        [unregistered-generator] a random op draws from a generator that is not registered
          where:    node bernoulli_default
          observed: aten.bernoulli.default with a torch.Generator on cpu
          expected: the default generator of the device
          hint:     drop the generator argument and seed with torch.manual_seed
        """
    return bad, good, message


def _no_fake() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(torch.ops.passes_test.real_only.default, fake(2))
    good = by_hand(torch.ops.passes_test.with_fake.default, fake(2))
    message = """
        [no-fake-impl] a custom op has no fake implementation
          where:    node real_only_default
          observed: passes_test.real_only.default has real kernels only
          expected: a fake, Meta or composite kernel
          hint:     add one with torch.library.register_fake
        """
    return bad, good, message


def _layout() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(aten.mul.Tensor, torch.eye(2).to_sparse(), 2.0)
    good = by_hand(aten.mul.Tensor, torch.eye(2).expand(3, 2, 2), 2.0)
    message = """
        [unsupported-layout] a tensor is not a plain strided one
          where:    node mul_tensor
          observed: aten.mul.Tensor on layout torch.sparse_coo, shape (2, 2), torch.float32, cpu
          expected: dense tensors with layout torch.strided
          hint:     stay with dense tensors, or convert outside of the region
        """
    return bad, good, message


def _subclass() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(aten.neg.default, torch.ones(2).as_subclass(Marked))
    good = by_hand(aten.neg.default, torch.nn.Parameter(torch.ones(2)))
    message = f"""
        [tensor-subclass] a tensor is of a subclass of torch.Tensor
          where:    node neg_default
          observed: aten.neg.default on {__name__}.Marked
          expected: plain tensors
          hint:     trace with AOTAutograd, which takes wrapper subclasses apart, or pass the plain tensors inside
        """
    return bad, good, message


def _collective() -> tuple[GraphModule, GraphModule, str]:
    bad = by_hand(dist.barrier)
    good = by_hand(dist.get_world_size)
    message = """
        [collective] a collective cannot be captured
          where:    node barrier
          observed: torch.distributed.distributed_c10d.barrier makes the host wait
          expected: a collective that runs on the stream alone
          hint:     use the nccl backend, or communicate outside of the graphed callable
        """
    return bad, good, message


def _print() -> tuple[GraphModule, GraphModule, str]:
    message = """
        [print-side-effect] the graph prints
          where:    node print_1
          observed: builtins.print
          expected: no output from within the graph
          hint:     print outside, from a returned value
        """
    return by_hand(print, fake(2)), by_hand(aten._assert_async.msg, fake(), "text"), message


TRIPLES = {
    "host-sync": _item,
    "data-dependent-shape": _mask,
    "several-devices": _devices,
    "cudagraph-unsafe-op": _unsafe,
    "higher-order-op": _higher_order,
    "unregistered-generator": _generator,
    "no-fake-impl": _no_fake,
    "unsupported-layout": _layout,
    "tensor-subclass": _subclass,
    "collective": _collective,
    "print-side-effect": _print,
}


@pytest.mark.parametrize("rule", CAPTURABLE, ids=lambda rule: rule.id)
def test_the_smallest_violation_the_nearest_non_violation_and_the_message(rule: NodeConstraint) -> None:
    bad, good, message = TRIPLES[rule.id]()
    report = check(bad)
    assert [str(violation) for violation in report.violations] == [textwrap.dedent(message).strip()]
    assert str(check(good)) == "no violations"


def test_the_table_has_no_row_for_a_rule_that_does_not_exist() -> None:
    assert set(TRIPLES) == set(RULES)


# -- reasons, as a person writes them, without any values in the graph ------------------------------------------------

EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "x.item()": ("host-sync",),
    "x.tolist()": ("host-sync",),
    "x.cpu()": ("host-sync",),
    "x.numpy()": ("host-sync",),
    "x.to('cpu')": ("host-sync",),
    "x.to(device='cpu')": ("host-sync",),
    "x.to(torch.device('cpu'), torch.float16)": ("host-sync",),
    "x.to(torch.float16)": (),
    "x.to('cuda')": (),
    "x.to(y)": (),
    "x.is_nonzero()": ("host-sync",),
    "torch.is_nonzero(x)": ("host-sync",),
    "torch.equal(x, y)": ("host-sync",),
    "torch.allclose(x, y)": ("host-sync",),
    "torch.isclose(x, y)": (),
    "torch.histc(x)": ("host-sync",),
    "torch.histc(x, 4, 0, 1)": (),
    "torch.histc(x, min=0, max=1)": (),
    "torch.ops.aten._local_scalar_dense(x)": ("host-sync",),
    "torch.nonzero(x)": ("data-dependent-shape",),
    "x.nonzero()": ("data-dependent-shape",),
    "torch.ops.aten.nonzero(x)": ("data-dependent-shape",),
    "torch.argwhere(x)": ("data-dependent-shape",),
    "torch.nonzero_static(x, size=3)": (),
    "torch.where(x > 0)": ("data-dependent-shape",),
    "torch.where(x > 0, x, y)": (),
    "torch.masked_select(x, y)": ("data-dependent-shape",),
    "torch.masked_fill(x, x > 0, 0.0)": (),
    "x.masked_scatter(x > 0, y)": (),
    "torch.unique(x)": ("data-dependent-shape",),
    "x.unique()": ("data-dependent-shape",),
    "torch.unique(x, return_counts=True)": ("data-dependent-shape",),
    "torch.unique(x, dim=0)": ("data-dependent-shape",),
    "torch.unique_consecutive(x)": ("data-dependent-shape",),
    "torch.bincount(x)": ("data-dependent-shape",),
    "torch.bincount(x, minlength=4)": ("data-dependent-shape",),
    "torch.combinations(x)": ("data-dependent-shape",),
    "x.repeat_interleave(y)": ("data-dependent-shape",),
    "torch.repeat_interleave(y)": ("data-dependent-shape",),
    "torch.repeat_interleave(x, repeats=y)": ("data-dependent-shape",),
    "x.repeat_interleave(2)": (),
    "torch.repeat_interleave(x, y, output_size=6)": (),
    "torch.nn.functional.one_hot(x)": ("data-dependent-shape",),
    "torch.nn.functional.one_hot(x, 4)": (),
    "x[x > 0]": ("data-dependent-shape",),
    "x[x.bool()]": ("data-dependent-shape",),
    "x[x.to(torch.bool)]": ("data-dependent-shape",),
    "x[x.to(dtype=torch.uint8)]": ("data-dependent-shape",),
    "x[x.type(torch.bool)]": ("data-dependent-shape",),
    "x[x.type('torch.BoolTensor')]": ("data-dependent-shape",),
    "x[x.view(torch.bool)]": ("data-dependent-shape",),
    "x[(x > 0).view(-1)]": ("data-dependent-shape",),
    "x[(x > 0)[0]]": ("data-dependent-shape",),
    "x[(x > 0).any(-1)]": ("data-dependent-shape",),
    "x[torch.cat([x > 0, y > 0])]": ("data-dependent-shape",),
    "x[torch.zeros_like(x, dtype=torch.bool)]": ("data-dependent-shape",),
    "x[(x > 0).clone().t()]": ("data-dependent-shape",),
    "x[(x > 0).to(torch.long)]": (),
    "x[(x > 0).long().view(-1)]": (),
    "x[torch.zeros_like(x > 0, dtype=torch.long)]": (),
    "x[(x > 0).sum(-1)]": (),
    "x[: y.sum()]": ("host-sync",),
    "x[x.argmax() :: 2]": ("host-sync",),
    "x[: x.shape[0] // 2]": (),
    "x[: y]": (),  # an input: it may be a number
    "x[y.sum()]": (),
    "torch.arange(x.sum())": ("host-sync",),
    "torch.arange(x.size(0))": (),
    "torch.arange(y)": (),
    "torch.full((2,), x.sum())": ("host-sync",),
    "x.new_full((2,), x.sum())": ("host-sync",),
    "x.narrow(0, y.argmax(), 1)": ("host-sync",),
    "x.topk(y.max())": ("host-sync",),
    "x.topk(x.shape[0])": (),
    "torch.tensor_split(x, y.long())": ("host-sync",),
    "torch._assert(x.sum() > 0, 'positive')": ("host-sync",),
    "torch._assert(x.dim() == 2, 'a matrix')": (),
    "torch.istft(x, 16)": ("host-sync",),
    "x[:, y == 1]": ("data-dependent-shape",),
    "x[(x > 0) & ~(y < 1)]": ("data-dependent-shape",),
    "x[y.bool()]": ("data-dependent-shape",),
    "x[torch.logical_not(y)]": ("data-dependent-shape",),
    "x[torch.isnan(x), 0]": ("data-dependent-shape",),
    "x[y]": (),
    "x[y.long(), None, 1:2]": (),
    "x[:, 0]": (),
    "x[..., y & 3]": (),
    "x.index_put((x > 0,), y)": ("data-dependent-shape",),
    "x.index_put_((y,), y)": (),
    "torch.topk(x, 2)": (),
    "torch.sort(x)": (),
    "x.to_sparse()": ("unsupported-layout",),
    "x.to_dense()": (),
    "torch.multinomial(x, 2)": (),
    "torch.linalg.inv(x)": ("host-sync",),
    "x.inverse()": ("host-sync",),
    "torch.linalg.inv_ex(x)": (),
    "torch.linalg.solve(x, y)": ("host-sync",),
    "torch.matrix_exp(x)": ("host-sync",),
    "torch.matrix_power(x, -1)": ("host-sync",),
    "torch.linalg.matrix_power(x, n=-2)": ("host-sync",),
    "x.matrix_power(2)": (),
    "torch.linalg.lstsq(x, y)": ("data-dependent-shape",),
    "torch.nn.functional.ctc_loss(x, y, (1,), (1,))": ("data-dependent-shape",),
    "torch.svd(x)": ("host-sync",),
    "torch.linalg.svdvals(x)": ("host-sync",),
    "torch.linalg.eigh(x)": ("host-sync",),
    "torch.linalg.qr(x)": (),
    "torch.linalg.cond(x)": ("host-sync",),
    "torch.linalg.cond(x, p='nuc')": ("host-sync",),
    "torch.linalg.cond(x, 1)": (),
    "torch.linalg.matrix_norm(x, ord=2)": ("host-sync",),
    "torch.linalg.matrix_norm(x)": (),
    "torch.norm(x, p='nuc')": ("host-sync",),
    "x.norm(2)": (),
    "torch.linalg.inv_ex(x, check_errors=True)": ("host-sync",),
    "torch.linalg.cholesky_ex(x)": (),
    "torch.linalg.cholesky_ex(x, check_errors=True)": ("host-sync",),
    "torch.linalg.lu_factor_ex(x)": (),
    "torch.linalg.ldl_factor_ex(x)": ("host-sync",),
    "torch.segment_reduce(x, 'sum', lengths=y)": ("host-sync",),
    "torch.segment_reduce(x, 'sum', lengths=y, unsafe=True)": (),
    "torch.segment_reduce(x, 'sum', offsets=y)": (),
    "torch.isin(x, y)": (),
    "torch.dropout(x, 0.5, True)": (),
}


@pytest.mark.parametrize(("expression", "expected"), EXPRESSIONS.items(), ids=EXPRESSIONS.keys())
def test_a_symbolic_trace_is_judged_by_what_it_shows(expression: str, expected: tuple[str, ...]) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def forward(x, y):\n    return {expression}\n", scope)
    gm = GraphModule(torch.nn.Module(), Tracer().trace(scope["forward"]))
    assert ids(gm) == expected


SIZES: dict[str, tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any], str | None]] = {
    "svd": (aten._linalg_svd.default, ((2, 2),), {}, "looks at its own result on the host"),
    "svd with another driver": (
        aten._linalg_svd.default,
        ((2, 2),),
        {"driver": "gesvd"},
        "looks at its own result on the host",
    ),
    "svd of nothing": (aten._linalg_svd.default, ((3, 0),), {}, None),
    "eigh": (aten._linalg_eigh.default, ((4, 2, 2),), {}, "looks at its own result on the host"),
    "eigh of nothing": (aten._linalg_eigh.default, ((0, 2, 2),), {}, None),
    "ldl": (aten.linalg_ldl_factor_ex.default, ((2, 2),), {}, "waits for the device"),
    "ldl of nothing": (aten.linalg_ldl_factor_ex.default, ((0, 0),), {}, None),
    "ldl solve": (aten.linalg_ldl_solve.default, ((2, 2), (2,), (2, 1)), {}, "waits for the device"),
    "lu of a wide matrix": (aten.linalg_lu.default, ((2, 3),), {}, "of shape (2, 3) waits for the device"),
    "lu of a square matrix": (aten.linalg_lu.default, ((1, 600, 600),), {}, None),
    "lu of nothing": (aten.linalg_lu.default, ((0, 2, 3),), {}, None),
    "many small matrices": (aten.linalg_inv_ex.default, ((500, 16, 16),), {}, None),
    "few matrices": (aten._linalg_solve_ex.default, ((4, 4, 128, 128), (4, 4, 128)), {}, None),
    "many matrices": (aten._linalg_det.default, ((17, 17, 17),), {}, "of shape (17, 17, 17) waits for the device"),
    "large matrices": (
        aten._linalg_slogdet.default,
        ((2, 129, 129),),
        {},
        "of shape (2, 129, 129) waits for the device",
    ),
    "checked": (
        aten.linalg_inv_ex.default,
        ((2, 2),),
        {"check_errors": True},
        "with check_errors looks at its own result on the host",
    ),
    "checked by default": (
        aten._lu_with_info.default,
        ((2, 2),),
        {},
        "with check_errors looks at its own result on the host",
    ),
    "lengths": (
        aten.segment_reduce.default,
        ((5,),),
        {"reduce": "sum", "lengths": torch.tensor([2, 3])},
        "without unsafe=True checks the lengths on the host",
    ),
    "unsafe lengths": (
        aten.segment_reduce.default,
        ((5,),),
        {"reduce": "sum", "lengths": torch.tensor([2, 3]), "unsafe": True},
        None,
    ),
    "looks for 9": (aten.isin.Tensor_Tensor, ((1,), (9,)), {}, None),
    "looks for 10": (aten.isin.Tensor_Tensor, ((1,), (10,)), {}, "with 10 values to look for"),
    "looks for 10 in more": (aten.isin.Tensor_Tensor, ((2,), (10,)), {}, None),
    "looks for 10 in nothing": (aten.isin.Tensor_Tensor, ((0,), (10,)), {}, None),
    "looks for 9, said to be unique": (aten.isin.Tensor_Tensor, ((1,), (9,)), {"assume_unique": True}, None),
    "looks for 10, said to be unique": (
        aten.isin.Tensor_Tensor,
        ((1,), (10,)),
        {"assume_unique": True},
        "sorts, and copies a flag of the host's into the result",
    ),
    "derivative of masked_scatter": (aten.masked_scatter_backward.default, ((4,), (4,)), {}, "selects by a mask"),
}


@pytest.mark.parametrize(("op", "shapes", "options", "expected"), SIZES.values(), ids=SIZES.keys())
def test_sizes_and_options_decide(op: Any, shapes: Any, options: dict[str, Any], expected: str | None) -> None:
    gm = by_hand(op, *(fake(*shape) for shape in shapes), **options)
    assert [violation.observed for violation in check(gm).violations] == ([f"{op} {expected}"] if expected else [])


def test_a_number_that_is_looked_for_in_many_is_one_element() -> None:
    assert ids(by_hand(aten.isin.Scalar_Tensor, 2, fake(10))) == ("data-dependent-shape",)
    assert ids(by_hand(aten.isin.Scalar_Tensor, 2, fake(9))) == ()


def test_sizes_that_are_not_known_are_not_guessed_at() -> None:
    for mode, expected in (("fake", ("host-sync",)), ("symbolic", ())):
        gm = make_fx(lambda x: torch.linalg.lu_factor_ex(x)[0], tracing_mode=mode)(torch.ones(17, 17, 17))
        assert ids(gm) == expected


def test_a_mask_that_is_written_through_is_found_as_well() -> None:
    assert ids(by_hand(operator.setitem, fake(3), fake(3, dtype=torch.bool), fake(3))) == ("data-dependent-shape",)
    assert ids(by_hand(operator.setitem, fake(3), fake(3, dtype=torch.uint8), 0.0)) == ("data-dependent-shape",)
    assert ids(by_hand(operator.setitem, fake(3), fake(3, dtype=torch.int64), 0.0)) == ()


def test_an_element_of_a_tuple_is_not_an_indexing() -> None:
    pair = by_hand(aten.aminmax.default, fake(3), result=(fake(), fake()))
    call = next(node for node in pair.graph.nodes if node.op == "call_function")
    with pair.graph.inserting_after(call):
        pair.graph.call_function(operator.getitem, (call, 0))
    assert ids(pair) == ()


@pytest.mark.parametrize("kind", [torch.nn.CTCLoss, lambda: torch.nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2])])
def test_leaf_modules_that_do_it_inside_are_known(kind: Callable[[], torch.nn.Module]) -> None:
    root = torch.nn.Module()
    root.loss, root.linear = kind(), torch.nn.Linear(2, 2)
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("loss", (x,)), graph.call_module("linear", (x,))))
    report = check(GraphModule(root, graph))
    assert [(violation.id, violation.where.node) for violation in report.violations] == [
        ("data-dependent-shape", "loss")
    ]


# -- the same through make_fx, Dynamo, export and AOTAutograd ----------------------------------------------------------

X = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "mask": (lambda x: x[x > 0] * 2, ("data-dependent-shape",)),
    "mask assignment": (lambda x: torch.index_put(x, (x > 0,), x.sum()), ("data-dependent-shape",)),
    "nonzero": (lambda x: torch.nonzero(x), ("data-dependent-shape",)),
    "item": (lambda x: x * x.sum().item(), ("host-sync",)),
    "size from data": (lambda x: torch.zeros(x.long().sum().item()), ("host-sync", "data-dependent-shape")),
    "normal": (lambda x: torch.normal(x, x + 1), ("host-sync",)),
    "normal with a number": (lambda x: torch.normal(x, 1.0), ()),
    "masked_fill with a tensor": (lambda x: x.masked_fill(x > 0, x.sum()), ("host-sync",)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 1.0), ()),
    "inverse": (lambda x: torch.linalg.inv(x), ("host-sync",)),
    "matrix exponential": (torch.matrix_exp, ("host-sync",)),
    "inverse without check": (lambda x: torch.linalg.inv_ex(x)[0], ()),
    "cpu of a cpu tensor": (lambda x: x.cpu() + 1, ()),
    "where": (lambda x: torch.where(x > 0, x, 0.0), ()),
    "integer index": (lambda x: x[torch.argsort(x[0])], ()),
    "batch norm": (lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), ()),
    "attention": (lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), ()),
    "dropout": (lambda x: torch.nn.functional.dropout(x), ()),
    "cross entropy": (lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(2, dtype=torch.long)), ()),
}


@pytest.mark.filterwarnings("ignore:.*does not have any Tensor outputs.*:UserWarning")
@pytest.mark.parametrize(("program", "expected"), PROGRAMS.values(), ids=PROGRAMS.keys())
def test_an_aten_graph_is_judged_by_operators_and_values(
    program: Callable[..., Any], expected: tuple[str, ...]
) -> None:
    gm = aten_level(program, X)
    assert ids(gm) == expected
    if inductor_utils.get_first_incompatible_cudagraph_node(gm) is not None:
        assert expected, "torch knows this graph as unsafe"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


def middle(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    z = y[y > 0.5]
    return z.sum() + y.sum().item()


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamo_graphs_give_the_users_lines() -> None:
    recorder = EagerAndRecordGraphs()
    torch.compile(middle, backend=recorder, fullgraph=True)(X)
    report = check(recorder.graphs[0])
    first = middle.__code__.co_firstlineno
    places = [(violation.id, violation.where.file, violation.where.line) for violation in report.violations]
    assert places == [("host-sync", __file__, first + 3), ("data-dependent-shape", __file__, first + 2)]


class Middle(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.masked_select(y, y > 0.5)


@pytest.mark.usefixtures("fresh_dynamo")
def test_exported_graphs_give_the_users_lines() -> None:
    (violation,) = check(torch.export.export(Middle(), (X,)).module()).violations
    line = inspect.getsourcelines(Middle.forward)[1] + 2
    assert (violation.id, violation.where.file, violation.where.line) == ("data-dependent-shape", __file__, line)


def test_frames_of_torch_and_of_this_package_are_not_the_users() -> None:
    gm = by_hand(torch.nonzero, fake(2))
    node = next(node for node in gm.graph.nodes if node.op == "call_function")
    library = [torch.nn.functional.__file__, inspect.getsourcefile(check), "<eval_with_key>.3"]
    frames = [("user.py", 7), *((str(file), 1) for file in library)]
    node.meta["stack_trace"] = "\n".join(f'  File "{file}", line {line}, in forward\n    code' for file, line in frames)
    (violation,) = check(gm).violations
    assert (violation.where.file, violation.where.line) == ("user.py", 7)
    node.meta["stack_trace"] = node.meta["stack_trace"].partition("\n    code")[2]
    (violation,) = check(gm).violations
    assert (violation.where.file, violation.where.line) == (None, None)


# -- devices ----------------------------------------------------------------------------------------------------------

CUDA0, CUDA1 = "cuda:0", "cuda:1"


@pytest.mark.parametrize(
    ("target", "inputs", "result", "expected"),
    [
        (aten._to_copy.default, [fake(2, device=CUDA0)], fake(2), "aten._to_copy.default from cuda:0 to cpu"),
        (aten._to_copy.default, [fake(2)], fake(2, device=CUDA0), "aten._to_copy.default from cpu to cuda:0"),
        (
            aten.copy_.default,
            [fake(2, device=CUDA0), fake(2)],
            fake(2, device=CUDA0),
            "aten.copy_.default from cpu to cuda:0",
        ),
        (aten.copy_.default, [fake(2), fake(2, device=CUDA0)], fake(2), "aten.copy_.default from cuda:0 to cpu"),
    ],
)
def test_a_copy_between_host_and_device_is_a_host_sync_and_nothing_else(
    target: Any, inputs: list[torch.Tensor], result: torch.Tensor, expected: str
) -> None:
    (violation,) = check(by_hand(target, *inputs, result=result)).violations
    assert violation.id == "host-sync"
    assert violation.observed == expected


ON_GPU = fake(4, 4, device=CUDA0)


@pytest.mark.parametrize(
    ("call", "result", "observed"),
    [
        (("tensor", [1.0, 2.0]), fake(2, device=CUDA0), "torch.tensor of numbers that Python holds, to cuda:0"),
        (("tensor", 1.0), fake(device=CUDA0), "torch.tensor of numbers that Python holds, to cuda:0"),
        (("as_tensor", [1.0, 2.0]), fake(2, device=CUDA0), "torch.as_tensor of numbers that Python holds, to cuda:0"),
        (("asarray", [1.0, 2.0]), fake(2, device=CUDA0), "torch.asarray of numbers that Python holds, to cuda:0"),
        (("tensor", [1.0, 2.0]), fake(2), None),
        (("as_tensor", ON_GPU), ON_GPU, None),
        (("as_tensor", fake(2)), fake(2, device=CUDA0), "torch.as_tensor from cpu to cuda:0"),
        (("full", (2,), 1.0), fake(2, device=CUDA0), None),
        (("scalar_tensor", 1.0), fake(device=CUDA0), None),
    ],
)
def test_numbers_that_python_holds_are_copied_where_they_become_a_tensor_of_a_device(
    call: tuple[Any, ...], result: torch.Tensor, observed: str | None
) -> None:
    name, *arguments = call
    gm = by_hand(getattr(torch, name), *arguments, result=result)
    assert [(one.id, one.observed) for one in check(gm).violations] == (
        [] if observed is None else [("host-sync", observed)]
    )


def test_new_tensor_is_judged_by_its_device_or_by_what_is_asked_for() -> None:
    assert ids(by_hand("new_tensor", ON_GPU, [1.0], result=fake(1, device=CUDA0), method=True)) == ("host-sync",)
    assert ids(by_hand("new_tensor", fake(2), [1.0], result=fake(1), method=True)) == ()
    assert ids(by_hand(torch.tensor, [1.0], device="cuda")) == ("host-sync",)
    assert ids(by_hand(torch.tensor, [1.0], device="cpu")) == ()
    assert ids(by_hand(torch.tensor, [1.0])) == ()


def test_a_tensor_in_a_list_of_numbers_is_read() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    total = graph.call_method("sum", (x,))
    graph.output(graph.call_function(torch.tensor, ([total, 1.0],)))
    (violation,) = check(GraphModule({}, graph)).violations
    assert (violation.id, violation.observed) == ("host-sync", "torch.tensor reads a number from sum_1")


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([0, 2], {CUDA0: "operator.getitem by a list, to cuda:0"}),
        ((slice(None), [0, 2]), {CUDA0: "operator.getitem by a list, to cuda:0"}),
        ((0, 2), {}),
        (slice(0, 2), {}),
        ([], {}),
        (0, {}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", CUDA0])
def test_a_list_as_an_index_of_a_device_tensor_is_copied(index: Any, expected: dict[str, str], device: str) -> None:
    gm = by_hand(operator.getitem, fake(4, 4, device=device), index, result=fake(2, 4, device=device))
    found = [(one.id, one.observed) for one in check(gm).violations]
    assert found == ([("host-sync", expected[device])] if device in expected else [])


@pytest.mark.parametrize("index", [[True, False], (slice(None), [True, False])])
def test_a_list_of_booleans_is_a_mask(index: Any) -> None:
    assert ids(by_hand(operator.getitem, fake(2, 2), index, result=fake(1, 2))) == ("data-dependent-shape",)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize("target", [operator.getitem, operator.setitem])
def test_an_index_without_dimensions_is_read_if_it_is_a_whole_number(target: Any, dtype: torch.dtype) -> None:
    more = (fake(4),) if target is operator.setitem else ()
    for index, dims in ((fake(dtype=dtype), 0), (fake(2, dtype=dtype), 1)):
        (found,) = check(by_hand(target, fake(4, 4), index, *more, result=fake(4))).violations or (None,)
        if dtype in (torch.bool, torch.uint8):
            assert found is not None
            assert found.id == "data-dependent-shape"
        elif dims or dtype is torch.float32:
            assert found is None
        else:
            assert found is not None
            name = "operator.getitem" if target is operator.getitem else "operator.setitem"
            assert (found.id, found.observed) == (
                "host-sync",
                f"{name} reads a number from x1, an index without dimensions",
            )


def test_a_copy_between_two_devices_is_several_devices() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("fake tensors of a second GPU need no GPU at all, or a second one")
    gm = by_hand(aten._to_copy.default, fake(2, device=CUDA0), result=fake(2, device=CUDA1))
    (violation,) = check(gm).violations
    assert violation.id == "several-devices"
    assert violation.observed == "aten._to_copy.default on cuda:0: x0; cuda:1: its result"


def test_a_cast_on_one_device_is_fine() -> None:
    assert (
        ids(by_hand(aten._to_copy.default, fake(2, device=CUDA0), result=fake(2, device=CUDA0), dtype=torch.half)) == ()
    )


def test_an_op_on_the_cpu_in_the_graph_of_another_device_is_found_although_it_is_consistent_in_itself() -> None:
    gm = by_hand(aten.neg.default, fake(2, device=CUDA0), result=fake(2, device=CUDA0))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        stale = gm.graph.call_function(aten.arange.default, (3,))
    stale.meta["val"] = fake(3)
    (violation,) = check(gm).violations
    assert (violation.id, violation.where.node) == ("several-devices", "arange_default")
    assert RULES["several-devices"].node_verdict(stale).observed == violation.observed  # type: ignore[union-attr]


def test_a_method_that_copies_is_judged_by_the_devices_where_these_are_known() -> None:
    assert ids(by_hand("to", fake(2), "cpu", result=fake(2), method=True)) == ()
    assert ids(by_hand("to", fake(2, device=CUDA0), "cpu", result=fake(2), method=True)) == ("host-sync",)
    assert ids(by_hand("cuda", fake(2), result=fake(2, device=CUDA0), method=True)) == ("host-sync",)
    assert ids(by_hand("cpu", fake(2), result=fake(2), method=True)) == ()
    assert ids(by_hand("cpu", fake(2, device=CUDA0), result=fake(2), method=True)) == ("host-sync",)
    assert ids(by_hand("cpu", fake(2, device=CUDA0), method=True)) == ("host-sync",)
    assert ids(by_hand("cpu", fake(2), method=True)) == ()


def test_an_attribute_says_where_it_lies_and_a_value_of_which_nothing_is_known_does_not() -> None:
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight", type_expr=torch.Tensor)
    copies = [graph.call_method("cpu", (one,)) for one in (x, weight)]
    graph.output(tuple(copies))
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.ones(2))
    found = check(GraphModule(root, graph)).violations
    assert [(violation.id, violation.where.node) for violation in found] == [("host-sync", copies[0].name)]


# -- generators, printing, waiting, layouts ---------------------------------------------------------------------------


def test_a_generator_is_found_wherever_it_stands_and_can_be_registered() -> None:
    generator = torch.Generator()
    positional = by_hand(aten.normal_.default, fake(2), 0.0, 1.0, generator=generator)
    method = by_hand("uniform_", fake(2), method=True, generator=generator)
    for gm in (positional, method):
        assert ids(gm) == ("unregistered-generator",)
        assert check(gm, [UnregisteredGenerator(registered=(generator,))])
    assert ids(by_hand(aten.bernoulli.default, fake(2), generator=None)) == ()


def test_another_object_for_the_default_generator_is_the_default_generator() -> None:
    # One that comes back from C++, as tracers of torch 2.13 hold it.
    again = torch.ops.fxgraph_tests.same_generator(torch.default_generator)
    assert again is not torch.default_generator
    assert ids(by_hand(torch.bernoulli, fake(2), generator=again)) == ()
    own = torch.Generator()
    assert ids(by_hand(torch.bernoulli, fake(2), generator=own)) == ("unregistered-generator",)
    own.set_state(torch.default_generator.get_state())  # equal numbers do not make it the same
    assert ids(by_hand(torch.bernoulli, fake(2), generator=own)) == ("unregistered-generator",)


def test_a_generator_that_is_an_input_cannot_be_the_default_one() -> None:
    graph = Graph()
    x, generator = graph.placeholder("x"), graph.placeholder("g")
    graph.output(graph.call_function(torch.bernoulli, (x,), {"generator": generator}))
    (violation,) = check(GraphModule(torch.nn.Module(), graph)).violations
    assert violation.observed == "torch.bernoulli with the generator g, which is not known before the call"


def test_every_way_to_print_is_found() -> None:
    assert ids(by_hand(aten._print.default, "text")) == ("print-side-effect",)
    assert ids(by_hand(warnings.warn, "text")) == ("print-side-effect",)
    if isinstance(printer := getattr(torch.ops.higher_order, "print", None), HigherOrderOperator):
        assert ids(by_hand(printer, "text")) == ("print-side-effect",)


def test_functions_that_no_symbolic_trace_can_hold_are_known_as_well() -> None:
    assert ids(by_hand(torch.Tensor.item, fake())) == ("host-sync",)
    assert ids(by_hand(torch.sparse_coo_tensor, fake(1, 2, dtype=torch.long), fake(2))) == ("unsupported-layout",)
    assert ids(by_hand(aten.index.Tensor, fake(2), fake(2, dtype=torch.uint8))) == ("data-dependent-shape",)


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_assert_about_a_size_is_refused_by_itself_and_left_out_where_it_follows_from_an_op() -> None:
    gm = torch.export.export(Middle(), (X,)).module()
    asserts = gm.graph.find_nodes(op="call_function", target=aten._assert_scalar.default)
    assert asserts
    assert not any(RULES["host-sync"].node_verdict(node) for node in asserts)
    assert ids(gm) == ("data-dependent-shape",)
    assert ids(by_hand(aten._assert_scalar.default, True, "text")) == ("host-sync",)


def test_waiting_for_the_device_is_found() -> None:
    (violation,) = check(by_hand(torch.cuda.synchronize)).violations
    assert (violation.id, violation.observed) == ("host-sync", "torch.cuda.synchronize waits for the device")


def test_every_op_that_touches_an_odd_tensor_is_named() -> None:
    sparse = torch.eye(2).to_sparse()
    gm = by_hand(aten.to_dense.default, sparse, result=torch.eye(2))
    assert ids(gm) == ("unsupported-layout",)
    gm = by_hand(aten.split.Tensor, fake(2), 1, result=[fake(1), torch.ones(1).as_subclass(Marked)])
    assert ids(gm) == ("tensor-subclass",)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated:UserWarning")  # since torch 2.13
@pytest.mark.parametrize("form", ["attribute", "attribute of a nested module", "leaf module"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_no_value_of_the_graph_is_judged_by_its_layout(layout: str, form: str) -> None:
    for make, expected in ((LAYOUTS[layout], ("unsupported-layout",)), (lambda: torch.eye(2), ())):
        root, holder, graph = torch.nn.Module(), torch.nn.Module(), Graph()
        root.holder = holder
        owner = root if form == "attribute" else holder
        owner.register_buffer("held", make())
        x = graph.placeholder("x")
        if form == "leaf module":
            result = graph.call_module("holder", (x,))
        else:
            name = "held" if owner is root else "holder.held"
            result = graph.call_function(torch.matmul, (graph.get_attr(name, type_expr=torch.Tensor), x))
        graph.output(result)
        found = check(GraphModule(root, graph)).violations
        assert [(violation.id, violation.where.node) for violation in found] == [(id, result.name) for id in expected]


@pytest.mark.parametrize("maker", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.parametrize("between", [(), ("clone",), ("neg", "t")])
def test_what_is_made_with_another_layout_is_followed_to_what_reads_it(maker: str, between: tuple[str, ...]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    names = []
    node = x
    for name in (maker, *between, "to_dense"):
        node = graph.call_method(name, (node,))
        names.append(node.name)
    graph.output(graph.call_method(between[0] if between else "neg", (node,)))  # this one is dense
    found = check(GraphModule(torch.nn.Module(), graph)).violations
    assert [(violation.id, violation.where.node) for violation in found] == [
        ("unsupported-layout", name) for name in names
    ]


@pytest.mark.parametrize("reader", sorted(op_lists.EXOTIC_READERS))
def test_what_reads_such_a_tensor_alone_is_found_where_nothing_is_known_of_it(reader: str) -> None:
    graph = Graph()
    graph.output(graph.call_method(reader, (graph.placeholder("x"),)))
    assert ids(GraphModule(torch.nn.Module(), graph)) == ("unsupported-layout",)
    assert ids(by_hand(reader, fake(2), method=True, result=fake(2))) == ()  # eager says what is wrong with a dense one


def test_a_fake_tensor_of_a_quantised_dtype_is_a_quantised_one() -> None:
    mode = FakeTensorMode()
    mode.cache_enabled = False  # torch cannot give one from the cache
    with mode:
        value = torch.empty(2, dtype=torch.qint8)
    assert ids(by_hand("dequantize", value, method=True)) == ("unsupported-layout",)


# -- collectives ------------------------------------------------------------------------------------------------------


def reduce_and_wait(group: str) -> GraphModule:
    functional = torch.ops._c10d_functional
    gm = by_hand(functional.all_reduce.default, fake(2), "sum", group, result=fake(2))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(functional.wait_tensor.default, output.args),)
    return gm


@pytest.mark.parametrize(
    ("backend", "reason"),
    {
        "nccl": None,
        "gloo": "the backend gloo",
        "mpi": "the backend mpi",
        "cpu:gloo,cuda:nccl": "the backend gloo",
        "cpu:nccl,cuda:gloo": None,
        "cuda:nccl": "the backend none",
        None: "a process group that is not known here",
    }.items(),
)
def test_the_backend_decides_for_the_collective_and_for_the_wait(backend: str | None, reason: str | None) -> None:
    found = list(Collective(backend_of=lambda name: backend).violations(reduce_and_wait("g")))
    ops = ("all_reduce", "wait_tensor") if reason else ()
    assert [violation.observed for violation in found] == [f"_c10d_functional.{op}.default on {reason}" for op in ops]


@pytest.fixture
def gloo() -> Iterator[str]:
    """The name of a process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.distributed_c10d._get_default_group().group_name
    dist.destroy_process_group()


def reduced_later(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, asynchronous": reduced_later,
    "reduce": lambda x: dist.reduce(x, 0),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "gather": lambda x: dist.gather(x, [torch.empty_like(x)]),
    "scatter": lambda x: dist.scatter(x, [torch.ones_like(x)]),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.ones_like(x)]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.ones_like(x)),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # since torch 2.13: those into tensors
def test_collectives_that_keep_their_process_group_as_an_object_are_judged_by_its_backend(kind: str, gloo: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        COLLECTIVES[kind](y)
        return y * 2

    gm = make_fx(function)(torch.ones(3))
    assert ids(gm) == ("collective",)
    assert check(gm).violations[0].observed.endswith("on the backend gloo")
    assert Collective(backend_of={gloo: "nccl"}.get).verdict(gm)
    assert not Collective(backend_of={gloo: None}.get).verdict(gm)


@pytest.mark.parametrize("default", [True, False])
def test_a_collective_that_a_graph_calls_as_a_function_is_judged_by_its_group(default: bool, gloo: str) -> None:
    one = None if default else dist.new_group([0], backend="gloo")
    gm = by_hand(dist.all_reduce, fake(2), group=one)
    name = gloo if one is None else one.group_name
    assert ids(gm) == ("collective",)
    assert Collective(backend_of={name: "nccl"}.get).verdict(gm)
    assert not Collective(backend_of={"another": "nccl"}.get).verdict(gm)


def test_collectives_on_objects_are_refused_on_every_backend() -> None:
    rule = Collective(backend_of=lambda name: "nccl")
    assert not rule.verdict(by_hand(dist.all_gather_object, [None], fake(1)))


def test_a_wait_for_what_is_not_in_the_graph_is_refused() -> None:
    wait = by_hand(torch.ops._c10d_functional.wait_tensor.default, fake(2))
    assert not Collective(backend_of=lambda name: "nccl").verdict(wait)


def test_a_group_with_a_backend_for_each_device_is_given_with_all() -> None:
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    try:
        name = dist.distributed_c10d._get_default_group().group_name
        assert ":" in str(backend_of_group(name))  # cpu:gloo,... or cuda:nccl, as torch is built
    finally:
        dist.destroy_process_group()


def test_other_backends_can_be_declared_as_stream_ordered() -> None:
    rule = Collective(stream_backends=("nccl", "mine"), backend_of=lambda name: "mine")
    assert rule.verdict(reduce_and_wait("g"))


def test_the_backend_of_a_group_is_looked_up_in_this_process() -> None:
    assert backend_of_group("0") is None
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        name = dist.distributed_c10d._get_default_group().group_name
        assert backend_of_group(name) == "gloo"
        assert backend_of_group("no such group") is None
        assert ids(reduce_and_wait(name)) == ("collective",)
    finally:
        dist.destroy_process_group()


def test_a_barrier_is_refused_on_every_backend() -> None:
    rule = Collective(backend_of=lambda name: "nccl")
    assert not rule.verdict(by_hand(torch.ops.c10d.barrier.default, fake(1), None, []))
    assert not rule.verdict(by_hand(dist.barrier))
    assert rule.verdict(by_hand(threading_barrier))


def threading_barrier() -> None:
    """Only its name resembles a collective."""


threading_barrier.__name__ = "barrier"


# -- torch's own knowledge --------------------------------------------------------------------------------------------


def node_of(target: Any) -> Node:
    """A call of ``target`` on placeholders without values, one per tensor argument of its schema."""
    graph = Graph()
    arguments: list[Any] = []
    if isinstance(target, OpOverload):
        for index, argument in enumerate(target._schema.arguments):
            if argument.has_default_value() or argument.kwarg_only:
                break
            kind = str(argument.type)
            arguments.append(graph.placeholder(f"x{index}") if "Tensor" in kind else 1)
    call = graph.call_function(target, tuple(arguments))
    graph.output(call)
    GraphModule(torch.nn.Module(), graph)
    return call


def refused(target: Any) -> list[str]:
    node = node_of(target)
    return [rule.id for rule in CAPTURABLE if not rule.node_verdict(node)]


def overloads(name: str) -> list[Any]:
    """What torch means by a name: ``aten.topk.default``, ``aten._assert_scalar`` or ``run_with_rng_state``."""
    namespace, _, rest = name.partition(".")
    if not rest:
        return [getattr(torch.ops.higher_order, name)]
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        return []
    return [getattr(packet, one) for one in ([overload] if overload else packet.overloads())]


FORBIDDEN_BY_TORCH = sorted(inductor_utils.FORBIDDEN_CUDAGRAPH_OPS)


@pytest.mark.parametrize("name", FORBIDDEN_BY_TORCH)
def test_what_torch_forbids_is_refused(name: str) -> None:
    targets = overloads(name)
    if not targets:  # fbgemm is an extra that may not be installed: then the name must be on our list
        assert name in op_lists.FORBIDDEN
    for target in targets:
        assert refused(target), target


def test_our_list_names_nothing_that_torch_has_dropped_from_its_own() -> None:
    assert set(FORBIDDEN_BY_TORCH) >= op_lists.FORBIDDEN


def tagged(*tags: torch.Tag) -> list[OpOverload]:
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(getattr(torch.ops, namespace), name):
            op = getattr(getattr(aten, name), overload or "default", None)
            if op is not None and any(tag in op.tags for tag in tags):
                found.append(op)
    return found


BY_ARGUMENTS = {aten.index.Tensor}
"""Tagged as of dynamic shape, but only with a boolean mask."""


@pytest.mark.parametrize("op", tagged(torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output), ids=str)
def test_what_torch_tags_as_unsafe_or_as_read_by_the_host_is_refused(op: OpOverload) -> None:
    assert refused(op)


@pytest.mark.parametrize("op", tagged(torch.Tag.dynamic_output_shape), ids=str)
def test_what_torch_tags_as_of_dynamic_shape_is_refused(op: OpOverload) -> None:
    assert refused(op) == ([] if op in BY_ARGUMENTS else ["data-dependent-shape"])


def of_torch_level(op: OpOverload) -> Node | None:
    """A call of the function, or of the method, that comes down to ``op``: on placeholders without values."""
    name, like = op._schema.name.partition("::")[2], node_of(op)
    function, method = getattr(torch, name, None), getattr(torch.Tensor, name, None)
    graph = like.graph
    with graph.inserting_before(like):
        if callable(function):
            return graph.call_function(function, like.args, like.kwargs)
        return graph.call_method(name, like.args, like.kwargs) if callable(method) else None


NAMED = [op for name in sorted(op_lists.SCALARS_ON_HOST | op_lists.FORBIDDEN) for op in overloads(name)]
TAGGED = tagged(torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@pytest.mark.parametrize("op", dict.fromkeys([*NAMED, *TAGGED]), ids=str)
def test_what_is_refused_as_an_operator_is_refused_as_the_function_that_comes_down_to_it(op: OpOverload) -> None:
    node = of_torch_level(op)
    found = [rule.id for rule in CAPTURABLE if node is not None and not rule.node_verdict(node)]
    assert node is None or found == refused(op)


@pytest.mark.parametrize("method", ["size", "numel", "dim"])
def test_a_number_that_follows_from_sizes_is_no_tensor(method: str) -> None:
    graph = Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    number = graph.call_function(operator.mul, (graph.call_method(method, (x,)), 2))
    call = graph.call_method("masked_fill", (x, mask, number))
    of_tensor = graph.call_method("masked_fill", (x, mask, graph.call_method("sum", (x,))))
    graph.output((call, of_tensor))
    gm = GraphModule(torch.nn.Module(), graph)
    assert [(found.id, found.where.node) for found in check(gm).violations] == [("host-sync", of_tensor.name)]


def registered() -> Iterator[OpOverload]:
    """Every operator of every namespace that Python can name."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
        if isinstance(op, OpOverload):
            yield op


def test_no_operator_of_any_namespace_that_torch_knows_as_unsafe_is_allowed() -> None:
    """Custom operators and those of torch's other libraries carry the same tags as ATen's."""
    tags = {torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    unsafe_ops = [op for op in registered() if tags.intersection(op.tags) and op not in BY_ARGUMENTS]
    assert torch.ops.passes_test.unsafe.default in unsafe_ops
    assert [str(op) for op in unsafe_ops if not refused(op)] == []


@pytest.mark.parametrize("name", sorted(op_lists.FORBIDDEN))
def test_what_torch_leaves_out_by_name_alone_is_refused_by_the_rule_of_that_name(name: str) -> None:
    for op in overloads(name):
        assert "cudagraph-unsafe-op" in refused(op)


def test_a_sparse_result_is_refused_as_torch_refuses_it() -> None:
    gm = by_hand(aten.clone.default, fake(2), result=torch.eye(2).to_sparse())
    assert inductor_utils.get_first_incompatible_cudagraph_node(gm) is not None
    assert ids(gm) == ("unsupported-layout",)


@pytest.mark.parametrize("op", [aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_an_index_put_is_refused_exactly_where_torch_refuses_it(op: OpOverload, dtype: torch.dtype) -> None:
    gm = by_hand(op, fake(3), [], fake(3), result=fake(3))
    call = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(call):
        index = gm.graph.call_function(aten.clone.default, (call.args[0],))
    index.meta["val"] = fake(3, dtype=dtype)
    call.args = (call.args[0], [None, index], call.args[2])
    unsafe_for_torch = inductor_utils.get_first_incompatible_cudagraph_node(gm) is not None
    assert unsafe_for_torch == (dtype is not torch.int64)
    assert ids(gm) == (("data-dependent-shape",) if unsafe_for_torch else ())


PLAIN = op_lists.READS_TO_HOST | op_lists.CHECKS_ON_HOST | op_lists.STATUS_ON_HOST | op_lists.DATA_DEPENDENT
PLAIN |= op_lists.STATUS_UNLESS_EMPTY | op_lists.WAITS_UNLESS_EMPTY | op_lists.LU_FACTORISING | op_lists.SELECTING
PLAIN |= op_lists.SINGULAR_VALUES_FOR.keys()
PLAIN |= (
    op_lists.INVERTING | op_lists.EXOTIC_LAYOUT | op_lists.HOST_BOUNDS | op_lists.MASK_MAKERS | op_lists.MASK_COMBINERS
)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_each_plain_name_on_our_lists_is_something_of_torchs(name: str) -> None:
    owners = (aten, torch, torch.Tensor, operator)
    assert any(hasattr(owner, name) for owner in owners)


@pytest.mark.parametrize("name", sorted(op_lists.SCALARS_ON_HOST))
def test_each_full_name_on_our_list_is_an_operator(name: str) -> None:
    assert [str(op) for op in overloads(name)] == [name]


def test_checking_changes_nothing() -> None:
    gm = aten_level(lambda x: x[x > 0], X)
    before = str(gm.graph), gm.code, [dict(node.meta) for node in gm.graph.nodes]
    check(gm)
    assert (str(gm.graph), gm.code, [dict(node.meta) for node in gm.graph.nodes]) == before


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def counted_inside(x: torch.Tensor) -> torch.Tensor:
    return x * x.nonzero().shape[0]


WRAPPED: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), ()),
    "checkpoint of what counts": (lambda x: checkpoint(counted_inside, x, use_reentrant=False), ("nonzero",)),
    "function": (lambda x: Doubled.apply(x.sin()), ()),
}


# Dynamo makes one to read its methods.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", WRAPPED)
def test_of_an_op_that_only_wraps_others_these_are_judged(name: str) -> None:
    function, inside = WRAPPED[name]
    graphs: list[GraphModule] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=lambda gm, _: graphs.append(gm) or gm.forward)(
            torch.ones(3, requires_grad=True)
        )
    (wrapper,) = (node for node in graphs[0].graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator))
    found = check(graphs[0]).violations
    assert [one.observed for one in found if one.id != "higher-order-op"] == [f"Tensor.{one}" for one in inside]
    assert all(one.where.node == wrapper.name for one in found)
    assert "higher-order-op" not in check(graphs[0]).ids
    if inside:
        code = counted_inside.__code__
        assert (found[0].where.file, found[0].where.line) == (code.co_filename, code.co_firstlineno + 1)


class Blocks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        return y.float() * scale


def test_blocks_of_an_exported_program_are_judged_by_what_is_in_them() -> None:
    gm = torch.export.export(Blocks(), (torch.ones(2, 2),)).module()
    assert any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in gm.graph.nodes)
    assert check(gm).ok


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_averages_all_its_batches_reads_how_many_there_were(
    momentum: float | None, training: bool
) -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=momentum)).train(training)
    expected = ("host-sync",) if training and momentum is None else ()
    assert ids(torch.fx.symbolic_trace(module)) == expected


def written(places: Any, value: Any) -> GraphModule:
    """``y[places] = value``, with "mask", "other", "number", "state" for tensors, and "literal" for a constant one."""
    graph = Graph()
    y = graph.placeholder("y")
    y.meta["val"] = fake(4, 4)
    named = {
        "mask": fake(4, dtype=torch.bool),
        "other": fake(4, dtype=torch.bool),
        "rows": fake(4, dtype=torch.int64),
        "number": fake(),
    }
    nodes: dict[str, Any] = {}
    for name, val in named.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = val
    nodes["state"] = graph.get_attr("state")
    nodes["literal"] = graph.call_function(torch.tensor, (2.0,))
    nodes["literal"].meta["val"] = fake()
    index = tuple(nodes.get(one, one) if isinstance(one, str) else one for one in places)
    graph.call_function(operator.setitem, (y, index, nodes.get(value, value) if isinstance(value, str) else value))
    graph.output(y)
    root = torch.nn.Module()
    root.register_buffer("state", torch.ones(()))
    return GraphModule(root, graph)


ALL = slice(None)


@pytest.mark.parametrize(
    ("places", "value", "is_fill"),
    [
        (("mask",), 0.5, True),
        ((ALL, "mask"), 1, True),
        ((slice(1, None), "mask"), True, True),
        ((0, "mask"), 1.0, True),
        (("mask",), "literal", True),
        (("mask",), "number", False),
        (("mask",), "state", False),
        (("mask", "rows"), 0.5, False),
        (("mask", "other"), 0.5, False),
        (("mask", [0, 1, 2, 3]), 0.5, False),
    ],
)
def test_a_number_written_by_a_mask_is_a_fill(places: Any, value: Any, is_fill: bool) -> None:
    assert ids(written(places, value)) == (() if is_fill else ("data-dependent-shape",))
