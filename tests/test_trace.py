"""From a callable to a described joint graph: its inputs, its outputs, and what happens to the user's Python."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import fxgraph
from fxgraph import TraceError, make_graphed_callables, trace
from fxgraph.graphed import as_function
from fxgraph.trace import InputKind, InputSpec, JointGraph, OutputKind, PythonTrace
from passes.facts import output_args

IN, OUT = InputKind, OutputKind


def read(target: Callable[..., Any], *args: Any, **kwargs: Any) -> PythonTrace:
    function = target.forward if isinstance(target, nn.Module) else target
    return trace.read(as_function(function), args, kwargs)


def joint(target: Callable[..., Any], *args: Any, **kwargs: Any) -> JointGraph:
    traced = read(target, *args, **kwargs)
    assert traced.graph is not None
    return trace.export(traced.graph, traced.specs, traced.flat_inputs(args, kwargs))


def kinds(specs: Any) -> collections.Counter[Any]:
    return collections.Counter(spec.kind for spec in specs)


def names(specs: Any, kind: InputKind) -> list[str]:
    return [spec.name for spec in specs if spec.kind is kind]


def fakes_in(*roots: Any) -> list[str]:
    """Where, among everything that can be reached from some objects, a tensor without data is."""
    found, seen, waiting = [], set(), [(root, f"root {i}") for i, root in enumerate(roots)]
    while waiting:
        value, path = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or value.is_meta:
                found.append(path)
            if value.is_leaf and value.grad is not None:
                waiting.append((value.grad, f"{path}.grad"))
        elif isinstance(value, dict):
            waiting += [(item, f"{path}[{key!r}]") for key, item in value.items()]
        elif isinstance(value, (list, tuple, set)):
            waiting += [(item, f"{path}[{i}]") for i, item in enumerate(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, type(torch))):
            waiting.append((vars(value), path))
    return found


# -- inputs and outputs of the joint graph ----------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.lin(x)) + self.shift


def test_parameters_buffers_inputs_and_tangents_are_told_apart() -> None:
    module = Norm()
    described = joint(module, torch.randn(5, 4, requires_grad=True))
    assert kinds(described.inputs) == {IN.PARAMETER: 4, IN.BUFFER: 4, IN.USER_INPUT: 1, IN.TANGENT: 1}
    for name in ("shift", "running_mean", "running_var", "num_batches_tracked"):
        assert any(f"['{name}']" in given for given in names(described.inputs, IN.BUFFER)), name
    assert sum("['weight']" in given for given in names(described.inputs, IN.PARAMETER)) == 2
    (user_input,) = names(described.inputs, IN.USER_INPUT)
    assert "'x'" in user_input


def test_each_description_fits_the_placeholder_it_stands_for() -> None:
    module = Norm()
    x = torch.randn(5, 4)
    described = joint(module, x)
    placeholders = described.gm.graph.find_nodes(op="placeholder")
    by_name = {"lin_weight": (3, 4), "running_mean": (3,), "num_batches_tracked": (), "shift": (3,), "'x'": (5, 4)}
    shapes = {}
    for node, spec in zip(placeholders, described.inputs, strict=True):
        shapes[spec.name.replace("._modules['lin']._parameters['weight']", "lin_weight")] = tuple(
            node.meta["val"].shape
        )
    for name, shape in by_name.items():
        (found,) = [value for key, value in shapes.items() if name in key]
        assert found == shape, name


def test_gradients_are_in_the_order_of_the_inputs_and_none_where_there_is_none() -> None:
    described = joint(Norm(), torch.randn(5, 4))  # x asks for no gradient
    results = output_args(described.gm)
    gradients = {
        spec.index: value for spec, value in zip(described.outputs, results, strict=True) if spec.kind is OUT.GRADIENT
    }
    assert sorted(gradients) == list(range(len(described.inputs) - 1))
    placeholders = described.gm.graph.find_nodes(op="placeholder")
    for index, value in gradients.items():
        assert (value is not None) == (described.inputs[index].kind is IN.PARAMETER)
        if value is not None:
            assert value.meta["val"].shape == placeholders[index].meta["val"].shape


def test_outputs_of_several_kinds() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        base = x * y
        return base.view(-1), base.t(), x.sum(), (x > 0), x.argmax()

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    described = joint(f, x, y)
    assert kinds(described.outputs) == {OUT.USER_OUTPUT: 5, OUT.INTERMEDIATE_BASE: 1, OUT.GRADIENT: 2}
    assert described.num_forward == 6
    for tangent, output in enumerate(described.tangent_of):
        spec = described.inputs[len(described.inputs) - len(described.tangent_of) + tangent]
        assert spec == InputSpec(IN.TANGENT, str(output))
        assert described.outputs[output].kind is not OUT.GRADIENT
    assert kinds(described.outputs[i] for i in described.tangent_of) == {OUT.USER_OUTPUT: 1, OUT.INTERMEDIATE_BASE: 1}


def test_an_input_that_autograd_sees_changed_has_an_update_among_the_outputs() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(w)
        return x.sum()

    described = joint(f, torch.randn(3), torch.randn(3, requires_grad=True))
    updates = [spec for spec in described.outputs if spec.kind is OUT.MUTATED_INPUT]
    assert [described.inputs[spec.index].name for spec in updates] == [
        n for n in names(described.inputs, IN.USER_INPUT) if "'x'" in n
    ]
    assert described.outputs[0].kind is OUT.MUTATED_INPUT


def test_without_gradients_there_is_only_a_forward() -> None:
    with torch.no_grad():
        described = joint(Norm(), torch.randn(5, 4))
    assert kinds(described.outputs) == {OUT.USER_OUTPUT: 1}
    assert described.tangent_of == ()
    assert described.num_forward == 1


def test_describe_lists_every_input_and_output_for_people() -> None:
    text = joint(Norm(), torch.randn(5, 4)).describe()
    described = joint(Norm(), torch.randn(5, 4))
    assert text.count("\nout  ") == len(described.outputs)
    assert text.count("in   ") == len(described.inputs)
    for word in (
        "parameter 'lin.weight'",
        "buffer 'bn.running_mean'",
        "user input x",
        "tangent 0",
        "user output 0",
        "gradient 0",
    ):
        assert word in text


def test_the_inputs_requires_grad_is_kept_and_only_metadata_of_real_inputs_is_used() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    module = Norm()
    before = copy.deepcopy(module.state_dict())
    described = joint(module, x)
    examples = trace.example_inputs(described)
    assert [e.requires_grad for e in examples] == [
        spec.kind is IN.PARAMETER or spec.kind is IN.USER_INPUT for spec in described.inputs[:-1]
    ]
    assert all(isinstance(e, FakeTensor) for e in examples)
    assert x.grad is None and x._version == 0
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


# -- arguments --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    scale: float


def nested(batch: Any, *rest: torch.Tensor, extra: dict[str, Any], flag: bool = True, none: Any = None) -> Any:
    x, more = batch
    total = x + more["y"][0] * extra["z"] + sum(rest)
    return {"total": total, "parts": [x * 2, Pair(total.sum(), None)], "flag": flag, "none": none}


def test_nested_containers_keyword_arguments_none_and_constants() -> None:
    x, y, z, r = (torch.randn(2, 2, requires_grad=True) for _ in range(4))
    args, kwargs = ((x, {"y": [y]}), r), {"extra": {"z": z, "n": 3}, "none": None}
    traced = read(nested, *args, **kwargs)
    found = traced.flat_inputs(args, kwargs)
    assert sorted(map(id, found)) == sorted(map(id, (x, y, z, r)))  # the very tensors, each once
    result = traced.bind(lambda *inputs: traced.graph(*inputs))(*args, **kwargs)
    expected = nested(*args, **kwargs)
    assert result["flag"] is True and result["none"] is None and list(result) == list(expected)
    assert type(result["parts"][1]) is Pair and result["parts"][1].right is None
    torch.testing.assert_close(result["total"], expected["total"], rtol=0, atol=0)
    torch.testing.assert_close(result["parts"][1].left, expected["parts"][1].left, rtol=0, atol=0)


def test_a_constant_is_part_of_the_trace_and_guarded() -> None:
    def f(x: torch.Tensor, scale: float, mode: str = "a", place: Any = None) -> torch.Tensor:
        return x * scale if mode == "a" else x - scale

    x = torch.ones(2)
    traced = read(f, x, 2.0)
    assert len(traced.specs) == 1
    assert traced.check({"x": x, "scale": 2.0, "mode": "a", "place": None})
    for other in ({"scale": 3.0}, {"mode": "b"}, {"scale": 2}, {"x": torch.ones(3)}, {"x": torch.ones(2).double()}):
        call = {"x": x, "scale": 2.0, "mode": "a", "place": None, **other}
        assert not traced.check(call), other
        assert traced.why_not(call, (), call), other


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Batch(x, 2.0),
        lambda x: Pair(x, 2.0),
        lambda x: collections.OrderedDict(x=x, scale=2.0),
        lambda x: [x, (None, 2.0)],
    ],
    ids=["frozen dataclass", "namedtuple", "OrderedDict", "list"],
)
def test_containers(make: Callable[[torch.Tensor], Any]) -> None:
    def f(batch: Any) -> torch.Tensor:
        if isinstance(batch, Batch):
            return batch.x * batch.scale
        if isinstance(batch, dict):
            return batch["x"] * batch["scale"]
        return batch[0] * 2.0

    x = torch.randn(3, requires_grad=True)
    traced = read(f, make(x))
    (found,) = traced.flat_inputs((make(x),), {})
    assert found is x


def test_a_callable_without_tensor_ops_has_no_graph() -> None:
    def f(x: torch.Tensor, n: int) -> tuple[int, ...]:
        return n + 1, len(x.shape)

    assert read(f, torch.ones(2), 3).graph is None


def test_a_tensor_given_twice_is_one_input() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    x = torch.randn(3, requires_grad=True)
    traced = read(f, x, x)
    assert len(traced.specs) == 1
    assert not traced.check({"x": x, "y": x.detach().clone().requires_grad_()})


# -- closed-over tensors, tied parameters -----------------------------------------------------------------------------

GLOBAL_WEIGHT = torch.ones(3, requires_grad=True)


def uses_global(x: torch.Tensor) -> torch.Tensor:
    return x * GLOBAL_WEIGHT


def test_closed_over_and_global_tensors_become_inputs() -> None:
    weight, plain = torch.randn(3, requires_grad=True), torch.randn(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * weight + plain

    x = torch.randn(3)
    assert {id(t) for t in read(f, x).flat_inputs((x,), {})} == {id(x), id(weight), id(plain)}
    assert {id(t) for t in read(uses_global, x).flat_inputs((x,), {})} == {id(x), id(GLOBAL_WEIGHT)}


def test_closed_over_tensors_get_their_gradients_and_are_read_at_each_call(device: str) -> None:
    weight = torch.randn(3, device=device, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).sum()

    graphed = make_graphed_callables(f, (torch.zeros(3, device=device),))
    for _ in range(3):
        x = torch.randn(3, device=device)
        graphed(x).backward()
        torch.testing.assert_close(weight.grad, x, rtol=0, atol=0)
        weight.grad = None
        with torch.no_grad():
            weight.mul_(2.0)
        torch.testing.assert_close(graphed(x), f(x), rtol=0, atol=0)
    weight = torch.full((3,), 5.0, device=device, requires_grad=True)  # the closure's cell holds another tensor now
    x = torch.randn(3, device=device)
    graphed(x).backward()
    torch.testing.assert_close(weight.grad, x, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x).relu())


def test_tied_parameters_stay_tied(device: str) -> None:
    module = Tied().to(device)
    described = joint(module, torch.randn(2, 3, device=device))
    assert kinds(described.inputs)[IN.PARAMETER] == 1
    twin = copy.deepcopy(module)
    graphed = make_graphed_callables(module, (torch.randn(2, 3, device=device),))
    assert graphed.decode.weight is graphed.encode.weight
    x = torch.randn(2, 3, device=device)
    for _ in range(2):
        graphed(x).sum().backward()
        twin(x).sum().backward()
        torch.testing.assert_close(graphed.encode.weight.grad, twin.encode.weight.grad, rtol=0, atol=0)
    assert len(list(graphed.parameters())) == 1


# -- side effects of the user's Python --------------------------------------------------------------------------------


class Writer(nn.Module):
    """Writes into itself, its list, its dict and an object it shares with others, in each forward."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.last: Any = None
        self.seen: list[Any] = []
        self.table: dict[str, Any] = {}
        self.calls = 0
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        self.calls += 1
        self.seen.append(x.sum())
        self.shared.append("called")
        self.table["out"] = self.lin(x)
        return self.table["out"].relu()


def test_nothing_is_written_while_graphing_and_no_fake_tensor_stays(device: str) -> None:
    shared: list[Any] = []
    module = Writer(shared).to(device)
    read(module, torch.randn(2, 2, device=device))
    graphed = make_graphed_callables(module, (torch.randn(2, 2, device=device),))
    assert graphed.last is None
    assert (graphed.calls, graphed.seen, graphed.table, shared) == (0, [], {}, [])
    assert fakes_in({k: v for k, v in vars(graphed).items() if k != "forward"}, shared) == []


def test_side_effects_are_carried_out_at_each_call(device: str) -> None:
    shared: list[Any] = []
    module = Writer(shared).to(device)
    twin = Writer([]).to(device)
    twin.load_state_dict(module.state_dict())
    graphed = make_graphed_callables(module, (torch.randn(2, 2, device=device),))
    for call in range(1, 4):
        x = torch.randn(2, 2, device=device)
        torch.testing.assert_close(graphed(x), twin(x), rtol=0, atol=0)
        assert graphed.calls == twin.calls == call
        assert shared == twin.shared == ["called"] * call
        for name in ("last", "seen", "table"):
            torch.testing.assert_close(getattr(graphed, name), getattr(twin, name), rtol=0, atol=0)
        assert graphed.table["out"].requires_grad and not graphed.last.requires_grad
        assert fakes_in({k: v for k, v in vars(graphed).items() if k != "forward"}, shared) == []


def test_side_effects_that_no_guard_reads_are_carried_out_by_replays(device: str) -> None:
    class Remembers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x + 1

    graphed = make_graphed_callables(Remembers(), (torch.zeros(3, device=device),))
    x = torch.randn(3, device=device)
    graphed(x)  # from now on the attribute exists
    before = fxgraph.stats(graphed)
    kept = []
    for number in (1.0, 2.0):
        graphed(torch.full((3,), number, device=device))
        kept.append(graphed.last)
    assert [t.tolist() for t in kept] == [[2.0] * 3, [4.0] * 3]  # also the first, after the second call
    assert fxgraph.stats(graphed).replays == before.replays + 2


def test_a_forward_that_fails_half_way_leaves_no_fake_tensor(device: str) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x + 1
            self.kept.append(x * 2)
            raise KeyError("own")

    module = Fails()
    with pytest.raises(KeyError):
        make_graphed_callables(module, (torch.zeros(2, device=device),))
    assert fakes_in(module) == []
    assert "forward" not in vars(module)


def test_mutated_containers_among_the_arguments_are_the_callers(device: str) -> None:
    def f(x: torch.Tensor, out: dict[str, Any]) -> torch.Tensor:
        out["double"] = x * 2
        return x + 1

    graphed = make_graphed_callables(f, (torch.zeros(3, device=device), {}))
    for _ in range(2):
        x, out = torch.randn(3, device=device), {}
        graphed(x, out)
        torch.testing.assert_close(out["double"], x * 2, rtol=0, atol=0)


# -- where a node comes from ------------------------------------------------------------------------------------------


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_nodes_carry_the_users_file_and_line() -> None:
    lines = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.cos()

    first = f.__code__.co_firstlineno
    lines = {"exp": first + 1, "cos": first + 2}
    x = torch.randn(3, requires_grad=True)
    traced = read(f, x)
    described = joint(f, x)
    for graph in (traced.graph, described.gm):
        for op, line in lines.items():
            nodes = [n for n in graph.graph.nodes if n.op.startswith("call_") and op in str(n.target)]
            assert nodes, op
            assert f'"{__file__}", line {line}' in nodes[0].stack_trace


def test_a_graph_break_is_an_error_that_names_the_line() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(TraceError) as caught:
        read(f, torch.ones(2))
    assert caught.value.id == "host-sync"
    assert caught.value.where == f"{__file__}:{f.__code__.co_firstlineno + 1} in f"
    assert caught.value.__cause__ is not None
    assert "\n" not in caught.value.observed


def test_an_op_that_fails_is_an_error_that_names_the_line() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    def f(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    with pytest.raises(TraceError) as caught:
        read(f, torch.ones(2, 3))
    assert caught.value.id == "op-failed"
    assert f"{__file__}:{inner.__code__.co_firstlineno + 1}" in caught.value.where
    assert "[2, 3]" in caught.value.observed or "2x3" in caught.value.observed


@pytest.fixture
def without_fake() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    library = torch.library.Library("fxgraph_trace_tests", "DEF")
    library.define("nofake(Tensor x) -> Tensor")
    library.impl("nofake", lambda x: x.clone(), "CPU")
    yield torch.ops.fxgraph_trace_tests.nofake
    library._destroy()


def test_an_op_without_a_fake_implementation_is_an_error(without_fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return without_fake(x)

    with pytest.raises(TraceError) as caught:
        joint(f, torch.ones(2))
    assert caught.value.id == "no-fake-impl"
    assert "fxgraph_trace_tests.nofake" in caught.value.observed
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in caught.value.where


# -- torch-level graphs -----------------------------------------------------------------------------------------------


def dynamo_graph(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo hands to a backend, and the flat inputs of the call."""
    seen: list[Any] = []

    def backend(graph: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            seen[:] = [graph, list(inputs)]
            return graph(*inputs)

        return run

    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return seen[0], seen[1]


def test_specialise_makes_sizes_constants() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[1], x.shape[0] * 2 // 2) * x.shape[0]

    x = torch.randn(4, 6)
    graph, inputs = dynamo_graph(f, x, dynamic=True)
    assert any(not isinstance(value, torch.Tensor) for value in inputs)  # Dynamo did hand over sizes
    special = trace.specialise(graph, inputs)
    assert len(special.graph.find_nodes(op="placeholder")) == 1
    (found,) = special(x)
    torch.testing.assert_close(found, f(x), rtol=0, atol=0)


def test_lift_attributes_makes_tensors_of_the_graph_inputs() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.randn(2))
    root.inner = nn.Module()
    root.inner.register_buffer("b", torch.randn(2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight, bias = graph.get_attr("weight"), graph.get_attr("inner.b")
    total = graph.call_function(torch.add, (graph.call_function(torch.mul, (x, weight)), bias))
    graph.output((graph.call_function(torch.add, (total, graph.get_attr("weight"))),))
    module = fx.GraphModule(root, graph)
    lifted, tensors = trace.lift_attributes(module)
    assert [id(t) for t in tensors] == [id(root.weight), id(root.inner.b)]
    assert not lifted.graph.find_nodes(op="get_attr")
    value = torch.randn(2)
    torch.testing.assert_close(lifted(value, *tensors), module(value), rtol=0, atol=0)


def test_lift_attributes_leaves_a_graph_without_them_as_it_is() -> None:
    graph = fx.symbolic_trace(lambda x: (x + 1,))
    assert trace.lift_attributes(graph) == (graph, ())


def test_detach_outputs_detaches_those_and_no_others() -> None:
    graph = fx.symbolic_trace(lambda x: (x * 2, x * 3, x * 4))
    x = torch.ones(2, requires_grad=True)
    assert [out.requires_grad for out in trace.detach_outputs(graph, [1])(x)] == [True, False, True]
    assert all(out.requires_grad for out in graph(x))


def test_wrapped_numbers_are_inputs_that_are_only_asked_for_their_number() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    number = graph.call_method("item", (b,))
    used = graph.call_method("item", (c,))
    graph.output((graph.call_function(torch.mul, (a, number)), used, c))
    assert trace.wrapped_numbers(fx.GraphModule({}, graph)) == (1,)


@pytest.mark.parametrize(
    ("source", "kind", "live", "text"),
    [
        ("L['self']._parameters['weight']", IN.PARAMETER, True, "parameter 'weight'"),
        ("L['self']._modules['bn']._buffers['running_mean']", IN.BUFFER, True, "buffer 'bn.running_mean'"),
        ("L['x']", IN.USER_INPUT, False, "user input x"),
        ("L['args'][0]['x']", IN.USER_INPUT, False, "user input args[0]['x']"),
        ("G['TABLE']", IN.USER_INPUT, False, "user input G['TABLE']"),
    ],
)
def test_the_expression_says_what_an_input_is(source: str, kind: InputKind, live: bool, text: str) -> None:
    spec = trace.spec_of(source)
    assert (spec.kind, spec.live, str(spec)) == (kind, live, text)
