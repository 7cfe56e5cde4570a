"""A plan, carried out by hand from its data alone, gives eager's outputs and gradients."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from fxgraph import partial as partials
from fxgraph import plan as planning
from fxgraph import trace
from fxgraph.effects import CannotPlan
from fxgraph.graphed import as_function
from fxgraph.plan import Plan
from passes.facts import output_args

aten = torch.ops.aten


def traced(function: Callable[..., Any], *args: Any) -> tuple[trace.PythonTrace, tuple[Any, ...]]:
    function = function.forward if isinstance(function, nn.Module) else function
    found = trace.read(as_function(function), args, {})
    assert found.graph is not None
    return found, found.flat_inputs(args, {})


def make(function: Callable[..., Any], *args: Any) -> tuple[Plan, tuple[torch.Tensor, ...], fx.GraphModule]:
    """The plan, the flat inputs and the torch-level graph of a call."""
    found, inputs = traced(function, *args)
    return planning.make(trace.export(found.graph, found.specs, inputs)), inputs, found.graph


def play(plan: Plan, inputs: Sequence[torch.Tensor], grad_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Carry out a plan: (node outputs, gradient per input, the tangents used)."""
    values = [tensor.detach() for tensor in inputs]
    buffers = plan.forward(*values)
    handed = [buffers[out.position] for out in plan.handed]
    tangents = [grad_of(handed[k]) for k in plan.tangents]
    places = {"input": values, "forward": buffers, "tangent": tangents}
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    if plan.backward is not None:
        found = plan.backward(*[places[source.kind][source.index] for source in plan.backward_inputs])
        for index, gradient in zip(plan.gradient_of, found, strict=True):
            gradients[index] = gradient
    return handed, gradients, tangents


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def leaf(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.out = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bn(self.conv(x)).relu().flatten(1))


# Each output is a buffer of the node, so that the plan's data says all there is to say.
FUNCTIONS: list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = [
    ("one output", lambda x, y: (x * y).sum(), lambda: (leaf(3), leaf(3))),
    ("several outputs", lambda x, y: (x * y, x.exp(), y + 1), lambda: (leaf(3), leaf(3))),
    ("an output that is saved", lambda x: x.exp(), lambda: (leaf(3),)),
    ("an output without gradient", lambda x: (x.max(0)[0], x.argmax(0)), lambda: (leaf(4, 3),)),
    ("an input without gradient", lambda x, y: x * y, lambda: (leaf(3), leaf(3, grad=False))),
    ("an unused input", lambda x, y: x * 2, lambda: (leaf(3), leaf(3))),
    ("the same output twice", lambda x: (lambda y: (y, y))(x.sin()), lambda: (leaf(3),)),
    ("gradients that are the tangent", lambda x, y: x + y, lambda: (leaf(3), leaf(3))),
    ("matmul", lambda x, y: x @ y, lambda: (leaf(3, 4), leaf(4, 2))),
    ("net", Net(), lambda: (leaf(5, 2, 4, 4),)),
    ("embedding", nn.Embedding(5, 3), lambda: (torch.tensor([1, 4, 1]),)),
    ("layer_norm", nn.LayerNorm(4), lambda: (leaf(3, 4),)),
]


@pytest.mark.parametrize(
    ("function", "args"), [f[1:] for f in FUNCTIONS], ids=[f[0].replace(" ", "-") for f in FUNCTIONS]
)
def test_the_plan_carried_out_gives_eagers_values(function: Callable[..., Any], args: Callable[[], Any]) -> None:
    plan, inputs, graph = make(function, *args())
    kept = [tensor.detach().clone() for tensor in inputs]
    handed, gradients, _ = play(plan, inputs, torch.cos)
    for tensor, value in zip(inputs, kept, strict=True):  # BatchNorm's statistics have been written in place
        tensor.data.copy_(value)
    outputs = graph(*inputs)
    made = [handed[ret.index] for ret in plan.returns if ret.how == "node"]
    assert len(made) == len(outputs)
    same(made, [out.detach() for out in outputs])
    differentiable = [out for out in outputs if out.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    unique = list({id(out): out for out in differentiable}.values())
    expected = iter(torch.autograd.grad(unique, wanted, [out.detach().cos() for out in unique], allow_unused=True))
    for tensor, gradient in zip(inputs, gradients, strict=True):
        same(gradient, next(expected) if tensor.requires_grad else None)


def test_every_gradient_has_memory_of_its_own() -> None:
    weight = leaf(3)

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + y + z.view(3) * weight

    plan, inputs, _ = make(f, leaf(3), leaf(3), leaf(1, 3))
    handed, gradients, tangents = play(plan, inputs, torch.cos)
    holders = [*inputs, *handed, *tangents, *[g for g in gradients if g is not None]]
    addresses = [tensor.untyped_storage().data_ptr() for tensor in holders]
    assert len(set(addresses)) == len(addresses)


def test_the_nodes_outputs_keep_eagers_requires_grad() -> None:
    plan, _, graph = make(lambda x: (x * 2, x > 0, x.detach() + 1, x.argmax()), leaf(3))
    assert [plan.handed[ret.index].requires_grad for ret in plan.returns] == [True, False, False, False]
    assert [out.requires_grad for out in graph(leaf(3))] == [True, False, False, False]


def test_two_names_of_one_value_are_one_buffer() -> None:
    graph = fx.symbolic_trace(lambda x: (lambda y: (y, y))(x.sin()))
    specs = [trace.InputSpec(trace.InputKind.USER_INPUT, "x")]
    plan = planning.make(trace.export(graph, specs, [leaf(3)]))
    assert len(plan.returns) == 2
    assert len({plan.handed[ret.index].position for ret in plan.returns}) == 1


# -- how outputs are made ---------------------------------------------------------------------------------------------


def test_views_are_made_after_the_node() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x * y
        return base, base.t(), x.view(-1), y[0], (x + 1).view(6)

    plan, _, _ = make(f, leaf(2, 3), leaf(2, 3))
    wanted = ["node", "view_of_node", "view_of_input", "view_of_input", "node"]  # the last: the only view of its base
    assert [ret.how for ret in plan.returns] == wanted


def test_view_returns_carry_the_look_of_the_view() -> None:
    plan, _, _ = make(lambda x: (lambda y: (y[1:, ::2], x.t()[1], y))(x * 2), leaf(3, 4))
    assert [ret.how for ret in plan.returns] == ["view_of_node", "view_of_input", "node"]
    expected = [torch.zeros(3, 4)[1:, ::2], torch.zeros(3, 4).t()[1]]
    for ret, like in zip(plan.returns, expected, strict=False):
        assert ret.meta is not None
        fake = ret.meta.like()
        assert (fake.size(), fake.stride(), fake.storage_offset(), fake.dtype) == (
            like.size(), like.stride(), like.storage_offset(), like.dtype,
        )  # fmt: skip
        assert fake.is_meta


@pytest.mark.parametrize("shape", [(0, 3), (), (1,), (2, 3)])
def test_a_look_of_any_shape_can_be_made(shape: tuple[int, ...]) -> None:
    model = torch.empty(shape)
    meta = planning.Meta(tuple(model.size()), model.stride(), 2, model.dtype)
    assert meta.like().shape == model.shape
    assert meta.like().storage_offset() == 2


# -- mutations --------------------------------------------------------------------------------------------------------


def test_buffers_are_mutated_by_the_region_itself() -> None:
    module = nn.BatchNorm1d(3)
    plan, inputs, _ = make(module, leaf(4, 3))
    assert {id(inputs[i]) for i in plan.mutated} == {id(b) for b in module.buffers()}
    assert plan.updates == ()


class Counts(nn.Module):
    def __init__(self, use: bool) -> None:
        super().__init__()
        self.use = use
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x * self.steps if self.use else x * 2


@pytest.mark.parametrize(
    ("module", "repeatable"),
    [
        (nn.BatchNorm1d(3), True),  # in training the statistics are only written
        (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)), True),
        (Counts(use=False), True),
        (Counts(use=True), False),
    ],
)
def test_what_uses_the_former_value_of_a_buffer_is_not_repeatable(module: nn.Module, repeatable: bool) -> None:
    plan, _, _ = make(module, leaf(4, 3))
    assert plan.repeatable is repeatable
    assert (plan.overwritten == set(plan.mutated)) is repeatable


def test_statistics_that_something_else_reads_matter() -> None:
    class ReadsThem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x), self.norm.running_var * 2

    module = ReadsThem()
    plan, inputs, _ = make(module, leaf(4, 3))
    assert not plan.repeatable
    assert {id(inputs[i]) for i in plan.mutated if i not in plan.overwritten} == {id(module.norm.running_var)}


def test_mutations_that_autograd_follows_are_updates_after_the_call() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return x.sum()

    x, w = torch.randn(3), leaf(3)
    plan, inputs, _ = make(f, x, w)
    ((index, position),) = plan.updates
    assert inputs[index] is x
    handed, _, _ = play(plan, inputs, torch.cos)
    same(handed[position], (x * w).detach())
    assert plan.handed[position].requires_grad
    assert not plan.repeatable


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda x: x * 2, False),
        (lambda x: torch.nn.functional.dropout(x, 0.5), True),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=False), False),
        (lambda x: x + torch.randn_like(x), True),
        (lambda x: torch.bernoulli(x.sigmoid()) * x, True),
    ],
)
def test_what_draws_random_numbers(function: Callable[..., Any], draws: bool) -> None:
    plan, _, _ = make(function, leaf(5))
    assert plan.draws is draws
    assert plan.repeatable  # from the same state of the generator


@pytest.mark.parametrize("change", [lambda x: x.t_(), lambda x: x.unsqueeze_(0)], ids=["t_", "unsqueeze_"])
def test_changed_metadata_of_an_input_cannot_be_planned(change: Callable[[torch.Tensor], Any]) -> None:
    graph = fx.symbolic_trace(lambda x: (change(x), x * 2)[1:])  # Dynamo itself breaks the graph there
    specs = [trace.InputSpec(trace.InputKind.USER_INPUT, "x")]
    with pytest.raises(CannotPlan, match="user input x has its shape, strides or storage changed in place"):
        planning.make(trace.export(graph, specs, [torch.randn(2, 3)]))


# -- what the backward keeps ------------------------------------------------------------------------------------------


def test_saved_live_are_parameters_that_the_backward_reads() -> None:
    module = nn.Linear(3, 2)
    plan, inputs, _ = make(module, leaf(4, 3))
    assert {id(inputs[i]) for i in plan.saved_live} == {id(module.weight)}
    assert plan.keeps
    plan, inputs, _ = make(module, leaf(4, 3, grad=False))  # no gradient flows through the weight
    assert not plan.saved_live


def test_saved_handed_are_outputs_that_the_backward_reads() -> None:
    plan, _, _ = make(lambda x: (x.exp(), x * 3), leaf(3))
    assert list(plan.saved_handed) == [plan.returns[0].index]


@pytest.mark.parametrize("changed", ["norm", "linear"])
@pytest.mark.parametrize("asked", ["x", "norm.weight", "linear.weight", "linear.bias"])
def test_what_a_gradient_needs_of_what_was_saved(changed: str, asked: str) -> None:
    module = nn.Sequential(collections.OrderedDict(norm=nn.LayerNorm(3), linear=nn.Linear(3, 2)))
    x = leaf(4, 3)
    plan, inputs, _ = make(module, x)
    weight, wanted = module.get_parameter(f"{changed}.weight"), x if asked == "x" else module.get_parameter(asked)
    out = module(x).sum()
    with torch.no_grad():
        weight.add_(1)
    try:  # a node of eager's unpacks all that it has saved, whichever of its gradients is asked for
        torch.autograd.grad(out, wanted)
        needs = False
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        needs = True
    (saved,) = (i for i in plan.saved_live if inputs[i] is weight)
    (gradient,) = (k for k, i in enumerate(plan.gradient_of) if inputs[i] is wanted)
    assert (not plan.saved_live[saved].isdisjoint(plan.needed_for([gradient]))) is needs
    assert needs is (changed == "linear" or not asked.startswith("linear"))


def test_a_backward_of_tangents_alone_keeps_nothing() -> None:
    plan, _, _ = make(lambda x, y: x * 3 + y, leaf(3), leaf(3))
    assert not plan.keeps
    assert {source.kind for source in plan.backward_inputs} == {"tangent"}


def test_the_forward_gives_no_more_than_outputs_and_saved_values() -> None:
    plan, _, _ = make(Net(), leaf(5, 2, 4, 4))
    positions = {out.position for out in plan.handed} | {s.index for s in plan.backward_inputs if s.kind == "forward"}
    assert positions == set(range(len(output_args(plan.forward))))


def test_unused_are_inputs_that_ask_for_a_gradient_and_have_none() -> None:
    x, y, z = leaf(3), leaf(3), leaf(3, grad=False)
    plan, inputs, _ = make(lambda x, y, z: (x * z, y.detach() * 2), x, y, z)
    assert [id(inputs[i]) for i in plan.unused] == [id(y)]


def test_a_plan_holds_no_data() -> None:
    module = Net()
    plan, _, _ = make(module, leaf(5, 2, 4, 4))
    assert plan.backward is not None
    for graph in (plan.forward, plan.backward, plan.joint.gm):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                assert isinstance(value, FakeTensor), node
        assert not [*graph.parameters(), *graph.buffers()]


# -- only some outputs have a gradient --------------------------------------------------------------------------------


def two_heads(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    trunk = (x @ w).tanh()
    return trunk @ v, trunk.sum(), w.exp() * 2


def with_views(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    base = x @ w
    return base.t(), (base * v.sum()).sin(), torch.nn.functional.dropout(w, 0.5).view(-1)


def normed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.nn.functional.layer_norm(x @ w, (4,), v[:, 0])
    return y, y.max(dim=1)[0], x.relu()


@pytest.mark.parametrize("function", [two_heads, with_views, normed])
def test_a_backward_of_some_outputs_starts_from_the_values_that_were_saved(function: Callable[..., Any]) -> None:
    x, w, v = leaf(3, 4), leaf(4, 4), leaf(4, 2)
    found, inputs = traced(function, x, w, v)
    joint = trace.export(found.graph, found.specs, inputs)
    plan = planning.make(joint)
    values = [tensor.detach() for tensor in inputs]
    torch.manual_seed(7)
    buffers = plan.forward(*values)
    places = {"input": values, "forward": buffers}
    count = len(plan.tangents)
    for defined in itertools.product([True, False], repeat=count):
        if all(defined) or not any(defined):
            continue
        detached = partials.outputs_without_gradient(joint, defined)
        narrowed = trace.export(trace.detach_outputs(found.graph, detached), found.specs, inputs)
        partial = partials.partial_backward(plan, narrowed)
        given = [s for s in plan.backward_inputs if s.kind != "tangent"]
        saved = [places[given[k].kind][given[k].index] for k in partial.saved]
        torch.manual_seed(7)
        outputs = found.graph(*inputs)
        eager_of = {
            ret.index: (out if ret.how == "node" else out._base) for ret, out in zip(plan.returns, outputs, strict=True)
        }
        used = [eager_of[k] for k, there in zip(plan.tangents, defined, strict=True) if there]
        tangents = [out.detach().cos() for out in used]
        gradients = dict(zip(partial.gradient_of, partial.graph(*saved, *tangents), strict=True))
        expected = torch.autograd.grad(used, [i for i in inputs if i.requires_grad], tangents, allow_unused=True)
        same([gradients.get(i) for i, t in enumerate(inputs) if t.requires_grad], list(expected))


def test_what_is_written_back_into_inputs_is_copied_in_few_operators() -> None:
    norms = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(4)]
    plan, _, _ = make(nn.Sequential(*norms), torch.randn(5, 3))
    targets = [node.target for node in plan.forward.graph.nodes]
    assert targets.count(aten.copy_.default) == 0
    assert targets.count(aten._foreach_copy_.default) == 2  # the statistics, the counters
    assert len(plan.mutated) == 12
