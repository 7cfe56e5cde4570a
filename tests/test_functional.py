"""passes/functional.py: no operator writes, inputs are written back, outputs are the tensors that they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from passes import FunctionalForm, Functionalize, LowerToAten, PassError, Pipeline, RemoveDeadCode, apply, judge
from passes.show import show

aten = torch.ops.aten
X, Y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)


def trace(function: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*(args or (X.clone(), Y.clone())))


def test_golden_text() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(y)
        fresh = y + 1
        fresh.relu_()
        return x, fresh, x.t()

    result = Pipeline((Functionalize(), RemoveDeadCode()))(trace(program))
    assert (
        show(result.graph_module)
        == """\
%x_1 : f32[2, 3] cpu = placeholder
%y_1 : f32[2, 3] cpu = placeholder
%mul : f32[2, 3] cpu = aten.mul.Tensor(%x_1, %y_1)
%add : f32[2, 3] cpu = aten.add.Tensor(%y_1, 1)
%relu : f32[2, 3] cpu = aten.relu.default(%add)
%copy_ : f32[2, 3] cpu = aten.copy_.default(%x_1, %mul)
%as_strided_default : f32[3, 2] strides (1, 3) cpu = aten.as_strided.default(%copy_, [3, 2], [1, 3], 0)
return (%copy_, %relu, %as_strided_default)"""
    )
    assert not Pipeline((Functionalize(),))(result.graph_module).modified


def test_a_graph_that_writes_nothing_is_left_alone() -> None:
    gm = trace(lambda x, y: (x.t() @ y, x.copy_(y))[:1])
    before = show(gm)
    assert show(apply(gm, [Functionalize()])) == before  # a write-back is what the form allows


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.add_(y),
        lambda x, y: (x[0].add_(1), x.sum())[1],
        lambda x, y: (x.t()[1:].copy_(y.t()[1:]), y.add_(x))[1],
        lambda x, y: ((v := (z := x + y).view(-1)), z.mul_(2), v[0].add_(1), z, v)[3:],
        lambda x, y: (torch.batch_norm(x, None, None, y[0], y[1], True, 0.1, 1e-5, False), y),
        lambda x, y: aten.index_put_(x, [torch.tensor([1, 1])], y, True),
        lambda x, y: (x.zero_(), x.fill_(2), y.masked_fill_(y > 8, 0.0))[2],
    ],
)
def test_values_inputs_and_shared_memory_are_as_before(function: Callable[..., Any]) -> None:
    gm = trace(function)
    result = apply(gm, [Functionalize()])
    assert judge(result, (FunctionalForm(),))
    runs = []
    for module in (gm, result):
        x, y = X.clone(), Y.clone()
        outputs = module(x, y)
        tensors = [x, y, *(outputs if isinstance(outputs, tuple) else (outputs,))]
        storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        runs.append(([tensor.tolist() for tensor in tensors], [storages.index(one) for one in storages]))
    assert runs[0] == runs[1]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.norm(x) * self.steps


def test_buffers_are_written_back_under_their_names() -> None:
    module, twin = Counting(), Counting()
    gm = apply(torch.export.export(module, (X,)).module(), [LowerToAten(), Functionalize()])
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = {str(node.args[0].target) for node in copies}
    assert written == {"steps", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for _ in range(2):
        assert torch.equal(gm(X), twin(X))
    assert gm.steps.item() == 2
    assert all(map(torch.equal, gm.norm.buffers(), twin.norm.buffers()))


def test_one_buffer_with_two_names_is_one_value() -> None:
    root = torch.nn.Module()
    root.register_buffer("one", torch.zeros(3))
    root.register_buffer("other", root.one)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Tensor, (graph.get_attr("one"), 1))
    graph.output(graph.call_function(aten.add.Tensor, (x, graph.get_attr("other"))))
    gm = apply(GraphModule(root, graph), [LowerToAten((X,)), Functionalize()])
    assert torch.equal(gm(X), X + 1)
    assert torch.equal(gm(X), X + 2)


class Constants(torch.nn.Module):
    """Attributes on one memory, most of them no buffers."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(24.0)
        self.first, self.second, self.strided = memory[:3], memory[3:6], memory[6:]
        self.tied = torch.nn.Parameter(self.first.detach())
        self.register_buffer("spare", memory[3:9])
        self.state = torch.zeros(3)


def reads_shared(held: Constants, x: torch.Tensor) -> Any:
    y = x + held.first
    y.add_(held.second)
    return y * held.tied


def returns_shared(held: Constants, x: torch.Tensor) -> Any:
    x.add_(1)
    return held.first, held.second[:2], x, held.tied * 2


def reads_by_strides(held: Constants, x: torch.Tensor) -> Any:
    y = x + held.strided.as_strided((3,), (2,), 7)
    return y.mul_(2)


def writes_a_constant(held: Constants, x: torch.Tensor) -> Any:
    y = held.state.add_(x)  # symbolic_trace would compute now what reads held.state itself
    return y * held.first, y


CONSTANTS = (reads_shared, returns_shared, reads_by_strides, writes_a_constant)
CONSTANT_TRACERS: dict[str, Callable[[torch.nn.Module], GraphModule]] = {
    "make_fx": lambda module: make_fx(module)(X[0].clone()),
    "symbolic_trace": lambda module: apply(symbolic_trace(module), [LowerToAten((X[0],))]),
    "export": lambda module: apply(torch.export.export(module, (X[0].clone(),)).module(), [LowerToAten()]),
}


@pytest.mark.parametrize("tracer", CONSTANT_TRACERS)
@pytest.mark.parametrize("body", CONSTANTS)
def test_constants_that_share_memory_and_are_not_written_are_no_obstacle(body: Any, tracer: str) -> None:
    def with_body() -> Any:
        return type("WithBody", (Constants,), {"forward": body})()

    runs = []
    for passes in (None, [], [Functionalize()]):
        module = with_body()
        run = module if passes is None else apply(CONSTANT_TRACERS[tracer](module), passes)
        module.state.zero_()  # make_fx has run it
        if passes:
            assert judge(run, (FunctionalForm(),))
        for _ in range(2):
            x = X[0].clone()
            outputs = pytree.tree_leaves(run(x))
            held = (module.first, module.second, module.tied, module.state)
            storages = [one.untyped_storage().data_ptr() for one in (x, *held, *outputs)]
            runs.append(([one.tolist() for one in (x, *held, *outputs)], [storages.index(one) for one in storages]))
    assert runs[:2] == runs[2:4] == runs[4:]


def test_an_input_of_symbolic_size_may_be_changed_and_returned() -> None:
    gm = trace(lambda x, y: (x.add_(y), y * 2), X.clone(), Y.clone(), mode="symbolic")
    result = apply(gm, [Functionalize()])
    x, y = torch.ones(4, 5), torch.ones(4, 5)
    assert result(x, y)[0].data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.full((4, 5), 2.0))


REFUSED: dict[str, tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "strides changed in place": ("changes sizes or strides in place", lambda x, y: x.t_().add_(1), (X, Y)),
    "memory read by strides": ("by strides", lambda x, y: x.as_strided((2, 2), (1, 1)).add_(1), (X, Y)),
    "strides of what is made here": (
        "by strides",
        lambda x, y: (x + 1).as_strided((2,), (1,)) + y.add_(1)[0, :2],
        (X, Y),
    ),
    "two inputs in one storage": ("two inputs share memory", lambda x, y: (x.add_(1), y + 1)[1], (X, X.view(3, 2))),
    "draws into other strides": (
        "draws into strides (1, 2)",
        lambda x, y: torch.empty_like(x).bernoulli_(0.5),
        (X.reshape(3, 2).t(), Y),
    ),
    "an output with gaps": (
        "output 0 would have strides (2, 1) instead of (4, 1)",
        lambda x, y: torch.empty_strided((2, 2), (4, 1)).fill_(1.0),
        (X, Y),
    ),
    "a view as another dtype": ("another dtype", lambda x, y: x.add_(1).view(torch.int32), (X, Y)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    reason, function, inputs = REFUSED[name]
    with pytest.raises(PassError) as caught:
        apply(trace(function, *inputs), [Functionalize()])
    assert isinstance(caught.value.__cause__, ValueError)
    assert reason in str(caught.value)


def test_a_view_of_a_changed_input_of_symbolic_size_is_refused() -> None:
    gm = trace(lambda x, y: x.add_(1).t(), X.clone(), Y.clone(), mode="symbolic")
    with pytest.raises(PassError, match="of symbolic size"):
        apply(gm, [Functionalize()])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("chosen", [Functionalize(), LowerToAten((X, Y))])
def test_an_op_whose_result_depends_on_data_is_named(chosen: Any, mode: str) -> None:
    make = make_fx(lambda x, y: x[y > 7].mul_(2), tracing_mode=mode, _allow_non_fake_inputs=True)
    if mode == "symbolic" and isinstance(chosen, LowerToAten):  # the graph has symbols, for sizes of data as well
        lowered = apply(make(X, Y), [chosen])
        assert all(torch.equal(lowered(x.clone(), Y), x[Y > 7] * 2) for x in (X, -X))
        return
    with pytest.raises(PassError, match="cannot be run on fake values") as caught:
        apply(make(X, Y), [chosen])
    assert [(found.id, found.where.node) for found in caught.value.report.violations] == [
        ("data-dependent-shape", "index")
    ]
    assert caught.value.stage == "requires"


@pytest.mark.parametrize("given", [(X, Y), (X.t(), Y.t()), (X[:, 1:], Y[:, :2])])
def test_values_that_make_fx_has_described_apart_are_brought_together(given: tuple[torch.Tensor, ...]) -> None:
    """Traced on real tensors, each node's fake value is of a mode of its own."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        z.mul_(2)
        x.add_(1)
        return z + y

    mine, its = ([tensor.clone() for tensor in given] for _ in range(2))
    result = apply(make_fx(program, tracing_mode="real")(*mine), [Functionalize()])
    assert judge(result, (FunctionalForm(),)).ok
    mine = [tensor.clone() for tensor in given]
    assert torch.equal(result(*mine), program(*its))
    assert torch.equal(mine[0], its[0])


def test_symbolic_sizes_stay_symbolic() -> None:
    gm = trace(lambda x, y: x.add_(y) * x.shape[0], X.clone(), Y.clone(), mode="symbolic")
    result = apply(gm, [Functionalize()])
    more = torch.ones(4, 5), torch.ones(4, 5)
    assert torch.equal(result(*more), torch.full((4, 5), 8.0))
    assert torch.equal(more[0], torch.full((4, 5), 2.0))


@torch.library.custom_op("passes_test::hidden", mutates_args=("x",))
def hidden(x: torch.Tensor) -> None:
    x.add_(1)


def test_the_rule_names_what_writes() -> None:
    gm = trace(lambda x, y: (torch.ops.passes_test.hidden(x), y.t()[0].mul_(2))[1])
    report = judge(gm, (FunctionalForm(),))
    assert [(violation.id, violation.observed) for violation in report.violations] == [
        ("functional-form", "passes_test.hidden.default writes x_1"),
        ("functional-form", "aten.mul_.Tensor writes select"),
    ]


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.clamp_(min=0),
        lambda y: y.cumsum_(0),
        lambda y: y.masked_fill_(y > 8, 0),
        lambda y: y.t().mul_(2),
        lambda y: y.index_add_(0, torch.tensor([1]), y[:1] * 3),
    ],
)
def test_sizes_may_be_symbols(write: Callable[[torch.Tensor], Any]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = x + y
        write(made)
        write(x)
        return made

    gm = apply(trace(program, mode="symbolic"), [Functionalize()])
    assert judge(gm, [FunctionalForm()])
    expected, found = (torch.arange(12.0).reshape(4, 3) for _ in range(2))
    other = torch.ones(4, 3)
    assert torch.equal(gm(found, other), program(expected, other))
    assert torch.equal(found, expected)


def test_branches_that_write_nothing_are_kept() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x * y,))

    gm = apply(trace(program, mode="real"), [Functionalize()])
    assert judge(gm, [FunctionalForm()])
    for start in (1.0, -9.0):
        expected, found = torch.full((2, 3), start), torch.full((2, 3), start)
        assert torch.equal(gm(found, Y), program(expected, Y))
        assert torch.equal(found, expected)
