"""``make_graphed_callables`` as a stand-in for torch's: what comes back, what is shared, and what bad input gets."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import Twins, assert_same

import fxgraph
from fxgraph import (
    ContractError,
    FxgraphError,
    InputError,
    OptionError,
    SignatureError,
    TraceError,
    make_graphed_callables,
)


class Net(nn.Module):
    """Has a state of each kind: parameters, buffers, a constant."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner, self.bn, self.outer = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.bn(self.inner(x)).relu()) * self.scale


def sample(device: str, rows: int = 5, grad: bool = False) -> torch.Tensor:
    return torch.randn(rows, 3, device=device, requires_grad=grad)


def train(module: nn.Module, device: str, steps: int = 3, seed: int = 11) -> list[torch.Tensor]:
    """The losses of some steps."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(sample(device)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_works_as_before(module: nn.Module, twin: nn.Module, device: str) -> None:
    """The module is not graphed, and trains as its copy does."""
    assert "forward" not in vars(module)
    assert_same(train(module, device), train(twin, device))
    assert_same(dict(module.state_dict()), dict(twin.state_dict()))


# -- what comes back --------------------------------------------------------------------------------------------------


def test_a_module_comes_back_as_the_same_object(device: str) -> None:
    module = Net().to(device)
    state, parameters = copy.deepcopy(module.state_dict()), [id(p) for p in module.parameters()]
    graphed = make_graphed_callables(module, (sample(device),))
    assert graphed is module
    assert type(graphed) is Net and isinstance(graphed, Net)
    assert [id(p) for p in graphed.parameters()] == parameters
    assert_same(dict(graphed.state_dict()), dict(state))
    assert list(dict(graphed.named_modules())) == ["", "inner", "bn", "outer"]
    assert all(p.grad is None for p in graphed.parameters())


def test_a_training_run_is_eagers_and_is_replayed(device: str) -> None:
    twins = Twins(Net(), sample(device), device=device)
    twins.both(lambda side: train(side.module, device, steps=4))
    twins.assert_replayed(4)


def test_a_function_keeps_its_signature_name_and_text(device: str) -> None:
    def scaled(x: torch.Tensor, /, y: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """Text."""
        return x * y * scale

    x = sample(device)
    graphed = make_graphed_callables(scaled, (x, x))
    assert inspect.signature(graphed) == inspect.signature(scaled)
    assert (graphed.__name__, graphed.__doc__, graphed.__module__) == (scaled.__name__, "Text.", scaled.__module__)
    assert callable(graphed) and graphed is not scaled
    assert_same(graphed(x, y=x), scaled(x, x))
    assert_same(graphed(x, x, scale=3.0), scaled(x, x, scale=3.0))


@pytest.mark.parametrize("kind", ["partial", "bound method", "callable object", "lambda"])
def test_other_callables(kind: str, device: str) -> None:
    class Scaler:
        factor = 3.0

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x / self.factor

    scaler = Scaler()
    targets: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(torch.mul, other=2.0),
        "bound method": scaler.scale,
        "callable object": scaler,
        "lambda": lambda x: x + 1,
    }
    target = targets[kind]
    graphed = make_graphed_callables(target, (sample(device),))
    for _ in range(2):
        x = sample(device, grad=True)
        assert_same(graphed(x).detach(), target(x).detach())
        assert_same(*[torch.autograd.grad(f(x).sum(), x) for f in (graphed, target)])
        scaler.factor += 1.0  # what the trace has read may change
    assert fxgraph.ungraph(graphed) is target


def test_a_method_of_a_module(device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    graphed = make_graphed_callables(module.forward, (sample(device),))
    x = sample(device)
    assert_same(graphed(x), twin(x))
    assert "forward" not in vars(module)


# -- ungraph ----------------------------------------------------------------------------------------------------------


def test_ungraph_gives_the_original_back(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    module = Net().to(device)
    twin = copy.deepcopy(module)
    assert fxgraph.ungraph(make_graphed_callables(f, (sample(device),))) is f
    make_graphed_callables(module, (sample(device),))
    assert fxgraph.ungraph(module) is module
    assert_works_as_before(module, twin, device)


@pytest.mark.parametrize("thing", [None, 3, len, nn.Linear(2, 2)], ids=repr)
def test_ungraph_of_what_is_not_graphed_is_itself(thing: Any) -> None:
    assert fxgraph.ungraph(thing) is thing


def test_ungraph_keeps_a_forward_of_the_instances_own(device: str) -> None:
    module = Net().to(device)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * 7

    module.forward = own  # type: ignore[method-assign]
    make_graphed_callables(module, (sample(device),), allow_unused_input=True)
    x = sample(device)
    assert_same(module(x), x * 7)
    fxgraph.ungraph(module)
    assert module.forward is own


def test_graphing_twice_does_not_graph_the_graph(device: str) -> None:
    twins = Twins(Net(), sample(device), device=device)
    again = make_graphed_callables(twins.graphed.module, (sample(device, rows=2),))
    assert again is twins.graphed.module
    twins.both(lambda side: side.module(sample(device, rows=2)))
    assert not isinstance(fxgraph.graphed.original_of(again), fxgraph.graphed.GraphedCallable)
    fxgraph.ungraph(again)
    assert "forward" not in vars(again)


# -- copies -----------------------------------------------------------------------------------------------------------


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved], ids=["deepcopy", "pickle", "torch.save"])


@COPIES
def test_a_copy_of_a_graphed_module_works_on_its_own_parameters(copied: Callable[[Any], Any], device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (sample(device),))
    other = copied(module)
    assert type(other) is Net
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in module.parameters()}
    assert_same(train(other, device), train(copy.deepcopy(twin), device))  # the copy trains ...
    assert_same(dict(module.state_dict()), dict(twin.state_dict()))  # ... and leaves the original alone,
    assert all(p.grad is None for p in module.parameters())
    assert_same(train(module, device), train(twin, device))  # which works on,
    assert fxgraph.stats(other).replays == fxgraph.stats(module).replays == 3  # both by replays


@COPIES
def test_a_copy_of_a_copy_and_a_copy_after_training(copied: Callable[[Any], Any], device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (sample(device),))
    assert_same(train(module, device), train(twin, device))
    other = copied(copied(module))
    assert_same(train(other, device, seed=3), train(twin, device, seed=3))


def test_a_graphed_module_inside_a_module_is_copied_with_it(device: str) -> None:
    net = nn.Sequential(Net(), nn.Tanh()).to(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net[0], (sample(device),))
    assert_same(train(copy.deepcopy(net), device), train(twin, device))


def top_level(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@COPIES
def test_a_copy_of_a_graphed_function(copied: Callable[[Any], Any], device: str) -> None:
    graphed = make_graphed_callables(top_level, (sample(device),))
    other = copied(graphed)
    x = sample(device)
    assert_same(other(x), top_level(x))
    assert fxgraph.ungraph(other) is top_level


# -- a tuple of callables ---------------------------------------------------------------------------------------------


def test_a_tuple_of_callables(device: str) -> None:
    first, second = nn.Linear(3, 4).to(device), nn.Linear(4, 2).to(device)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    twins = copy.deepcopy((first, second))
    samples = ((sample(device),), (torch.randn(5, 4, device=device, requires_grad=True),))
    samples += ((torch.randn(5, 2, device=device, requires_grad=True), torch.randn(5, 2, device=device)),)
    graphed = make_graphed_callables((first, second, loss), samples)
    assert type(graphed) is tuple and len(graphed) == 3
    assert graphed[0] is first and graphed[1] is second and fxgraph.ungraph(graphed[2]) is loss
    for _ in range(3):
        x, target = sample(device), torch.randn(5, 2, device=device)
        found = graphed[2](graphed[1](graphed[0](x)), target)
        expected = loss(twins[1](twins[0](x)), target)
        assert_same(found.detach(), expected.detach())
        found.backward()
        expected.backward()
    for one, other in zip((first, second), twins, strict=True):
        assert_same([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])
    assert fxgraph.stats(first).replays == fxgraph.stats(graphed[2]).replays == 3


def test_the_callables_of_a_tuple_may_be_called_in_any_order_and_number(device: str) -> None:
    layers = tuple(nn.Linear(3, 3).to(device) for _ in range(3))
    twins = copy.deepcopy(layers)
    graphed = make_graphed_callables(layers, ((sample(device, grad=True),),) * 3)

    def course(layers: Any) -> Any:
        torch.manual_seed(2)
        x = sample(device, grad=True)
        y = layers[2](layers[0](x)) + layers[1](x)
        z = layers[0](y)
        z.sum().backward()
        return [z, x.grad, *[p.grad for layer in layers for p in layer.parameters()]]

    for _ in range(2):
        found, expected = course(graphed), course(twins)
        assert_same([t.detach() for t in found], [t.detach() for t in expected])


def test_callables_of_a_tuple_that_share_parameters(device: str) -> None:
    first, second = nn.Linear(3, 3, bias=False).to(device), nn.Linear(3, 3, bias=False).to(device)
    second.weight = first.weight
    twins = copy.deepcopy((first, second))
    graphed = make_graphed_callables((first, second), ((sample(device),), (sample(device, grad=True),)))
    for _ in range(2):
        x = sample(device)
        for one, two in (graphed, twins):
            two(one(x)).sum().backward()
        assert_same(first.weight.grad, twins[0].weight.grad)
    assert second.weight is first.weight


def test_a_tuple_of_one(device: str) -> None:
    (graphed,) = make_graphed_callables((Net().to(device),), ((sample(device),),))
    assert isinstance(graphed, Net)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_sample_kwargs(device: str) -> None:
    def f(x: torch.Tensor, *, y: torch.Tensor, flip: bool = False) -> torch.Tensor:
        return x - y if flip else x + y

    x, y = sample(device), sample(device)
    graphed = make_graphed_callables(f, (x,), sample_kwargs={"y": y, "flip": True})
    assert_same(graphed(x, y=y, flip=True), x - y)
    assert fxgraph.stats(graphed).replays == 1 and len(fxgraph.stats(graphed).captures) == 1
    one, two = make_graphed_callables((f, f), ((x,), (x,)), sample_kwargs=({"y": y}, {"y": y, "flip": True}))
    assert_same([one(x, y=y), two(x, y=y, flip=True)], [x + y, x - y])
    assert fxgraph.stats(one).replays == fxgraph.stats(two).replays == 1


def test_a_bare_tensor_is_a_sample_of_one_argument(device: str) -> None:
    graphed = make_graphed_callables(top_level, sample(device))
    x = sample(device)
    assert_same(graphed(x), x * 3)


@pytest.mark.parametrize("iterations", [0, 1, 11])
def test_num_warmup_iters_leave_no_trace(iterations: int, device: str) -> None:
    twins = Twins(Net(), sample(device), device=device, num_warmup_iters=iterations)
    twins.both(lambda side: train(side.module, device))


def test_num_warmup_iters_is_how_often_a_region_runs_before_it_is_captured(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    engine = fxgraph.engines.get(device)
    capture = type(engine).capture

    def spy(self: Any, pool: Any, region: Any, inputs: Any, warmup: int) -> Any:
        seen.append(warmup)
        return capture(self, pool, region, inputs, warmup)

    monkeypatch.setattr(type(engine), "capture", spy)
    make_graphed_callables(top_level, (sample(device, grad=True),), 7)
    assert seen == [7, 7]  # forward and backward


def test_the_positional_order_is_torchs() -> None:
    ours = list(inspect.signature(make_graphed_callables).parameters)
    theirs = list(inspect.signature(torch.cuda.make_graphed_callables).parameters)
    assert ours[: len(theirs)] == theirs


def test_a_pool_is_shared(device: str) -> None:
    handle = torch.cuda.graph_pool_handle() if device == "cuda" else object()
    one = make_graphed_callables(Net().to(device), (sample(device),), pool=handle)
    two = make_graphed_callables(top_level, (sample(device),), 3, False, handle)
    x = sample(device)
    for graphed in (one, two):
        for pool in graphed_pools(graphed):
            assert pool.handle == handle
    first = one(x)
    kept = first.detach().clone()
    assert_same(two(x), x * 3)
    assert_same(first.detach(), kept)


def graphed_pools(graphed: Any) -> list[Any]:
    graphed = vars(graphed)["forward"] if isinstance(graphed, nn.Module) else graphed
    pools = [capture.pool for program in graphed.programs() for capture in program.captures.values()]
    assert pools
    return pools


def test_the_callables_of_a_tuple_share_one_pool_and_other_calls_do_not(device: str) -> None:
    graphed = make_graphed_callables((Net().to(device), top_level), ((sample(device),), (sample(device),)))
    pools = {id(pool) for g in graphed for pool in graphed_pools(g)}
    assert len(pools) == 1
    other = make_graphed_callables(Net().to(device), (sample(device),))
    assert {id(pool) for pool in graphed_pools(other)}.isdisjoint(pools)


def test_a_cuda_graphs_pool_may_be_given() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        y = x + 1
    graphed = make_graphed_callables(top_level, (sample("cuda"),), pool=graph.pool())
    value = sample("cuda")
    assert_same(graphed(value), value * 3)
    graph.replay()
    assert_same(y, torch.ones(4, device="cuda"))


# -- unused inputs ----------------------------------------------------------------------------------------------------


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.idle(x).detach()


def test_allow_unused_input_false_names_every_unused_input(device: str) -> None:
    module = HalfUsed().to(device)
    twin = copy.deepcopy(module)
    x, y = sample(device, grad=True), sample(device, grad=True)
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(module, (x, y))
    assert {violation.id for violation in caught.value.violations} == {"unused-input"}
    text = str(caught.value)
    for name in ("'idle.weight'", "'idle.bias'", "args[1]"):
        assert name in text
    assert "_modules['used']" not in text
    assert len(caught.value.violations) == 3
    assert "forward" not in vars(module)
    assert_same(*[m(x, y).detach() for m in (module, twin)])


def test_allow_unused_input_false_names_an_unused_argument(device: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y.detach()

    with pytest.raises(ContractError) as caught:
        make_graphed_callables(f, (sample(device, grad=True), sample(device, grad=True)))
    (violation,) = caught.value.violations
    assert violation.where.path == "args[1]"
    f_used = make_graphed_callables(f, (sample(device, grad=True), sample(device)))  # nearest that is right
    x = sample(device, grad=True)
    assert_same(f_used(x, x.detach()).detach(), x.detach() * 3)


def test_allow_unused_input_true_leaves_their_gradients_none(device: str) -> None:
    twins = Twins(HalfUsed(), sample(device), sample(device), device=device)

    def step(side: Any) -> Any:
        x, y = sample(device, grad=True), sample(device, grad=True)
        side.module(x, y).sum().backward()
        assert y.grad is None and side.module.idle.weight.grad is None
        return x.grad

    twins.both(step)
    twins.both(step)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "kwargs"),
    [
        (3, {}),
        ([torch.zeros(2, 3)], {}),
        (None, {}),
        ((torch.zeros(2, 3),), {"sample_kwargs": [("x", 1)]}),
        ((torch.zeros(2, 3),), {"sample_kwargs": ({},)}),
    ],
    ids=["number", "list", "None", "kwargs no dict", "kwargs a tuple"],
)
def test_samples_that_do_not_fit_one_callable(samples: Any, kwargs: Any) -> None:
    with pytest.raises(OptionError) as caught:
        make_graphed_callables(top_level, samples, **kwargs)
    assert caught.value.id == "sample-count"
    assert caught.value.where == ("sample_kwargs" if kwargs else "sample_args")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_count_of_samples(count: int) -> None:
    with pytest.raises(OptionError) as caught:
        make_graphed_callables((top_level, top_level), ((torch.zeros(2, 3),),) * count)
    assert caught.value.id == "sample-count"
    assert caught.value.observed == f"tuple of length {count}"
    assert "2 tuples" in caught.value.expected


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, None])
def test_a_bad_number_of_warm_up_iterations(count: Any) -> None:
    with pytest.raises(OptionError) as caught:
        make_graphed_callables(top_level, (torch.zeros(2, 3),), count)
    assert (caught.value.id, caught.value.where) == ("bad-option", "num_warmup_iters")


def test_an_unknown_option_is_named_and_the_allowed_are_listed() -> None:
    with pytest.raises(OptionError, match="'max_capture'") as caught:
        make_graphed_callables(top_level, (torch.zeros(2, 3),), options={"max_capture": 1})
    assert "max_captures" in caught.value.expected


@pytest.mark.parametrize("target", [3, None, "f", [top_level]], ids=["int", "None", "str", "list"])
def test_what_cannot_be_called(target: Any) -> None:
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(target, (torch.zeros(2, 3),))
    assert caught.value.id == "not-callable"


def test_all_violations_of_all_callables_at_once(device: str) -> None:
    hooked, trainable = Net().to(device), Net().to(device)
    hooked.inner.register_forward_hook(lambda *_: None)
    trainable.bn.running_mean.requires_grad_()
    with pytest.raises(ContractError) as caught:
        make_graphed_callables((hooked, trainable, 3), ((sample(device),),) * 3)
    assert [v.id for v in caught.value.violations] == ["module-hooks", "buffer-requires-grad", "not-callable"]
    for place in ("callables[0]", "callables[1]", "callables[2]"):
        assert place in str(caught.value)
    assert "forward" not in vars(hooked) and "forward" not in vars(trainable)


@pytest.mark.parametrize(
    ("args", "id"),
    [
        ((), "wrong-arguments"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "wrong-arguments"),
        ((object(),), "unsupported-argument"),
        ((torch.zeros(2, 3).to_sparse(),), "unsupported-layout"),
        ((torch.zeros(2, 3, device="meta"),), "meta-tensor"),
    ],
    ids=["too few", "too many", "an object", "sparse", "meta"],
)
def test_samples_that_break_the_contract(args: tuple[Any, ...], id: str) -> None:
    module = Net()
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(module, args)
    assert id in [violation.id for violation in caught.value.violations]
    assert_works_as_before(module, copy.deepcopy(module), "cpu")


@pytest.mark.parametrize(
    "args",
    [(torch.zeros(2, 5),), (torch.zeros(2, 3, dtype=torch.int64),), (3,), (None,)],
    ids=["shape", "dtype", "a number for a tensor", "None for a tensor"],
)
def test_samples_on_which_the_callable_itself_fails(args: tuple[Any, ...], device: str) -> None:
    args = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
    module = Net().to(device)
    with pytest.raises(Exception) as eager:
        copy.deepcopy(module)(*args)
    with pytest.raises((FxgraphError, type(eager.value))) as caught:
        make_graphed_callables(module, args)
    if not isinstance(caught.value, FxgraphError):
        assert str(caught.value) == str(eager.value)
        assert any("fxgraph" in note for note in caught.value.__notes__)
    else:
        assert caught.value.id in ("op-failed", "capture-failed")  # the latter: fake tensors let it through
        assert caught.value.__cause__ is not None
    assert_works_as_before(module, copy.deepcopy(module), device)


@pytest.mark.cuda
def test_a_cpu_tensor_for_a_cuda_callable() -> None:
    module = Net().to("cuda")
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(module, (sample("cpu"),))
    assert caught.value.id == "several-devices"
    make_graphed_callables(module, (sample("cuda"),))
    with pytest.raises(FxgraphError):
        module(sample("cpu"))
    module(sample("cuda")).sum().backward()


# -- bad calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"z": 2}), ((1,), {"x": 2})],
    ids=["few", "many", "name", "twice"],
)
def test_a_call_with_arguments_that_do_not_fit(args: Any, kwargs: Any, device: str) -> None:
    graphed = make_graphed_callables(top_level, (sample(device),))
    with pytest.raises(InputError) as caught:
        graphed(*args, **kwargs)
    assert caught.value.id == "wrong-arguments"
    assert isinstance(caught.value, TypeError)  # as Python's own
    assert "top_level(x" in caught.value.expected
    x = sample(device)
    assert_same(graphed(x), x * 3)


@pytest.mark.parametrize("bad", [lambda d: torch.zeros(2, 5, device=d), lambda d: 3], ids=["shape", "number"])
def test_a_call_on_which_the_callable_itself_fails(bad: Callable[[str], Any], device: str) -> None:
    twins = Twins(Net(), sample(device), device=device)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        twins.graphed.module(bad(device))
    with pytest.raises(type(caught.value.__cause__ or caught.value)):
        twins.eager.module(bad(device))
    assert isinstance(caught.value, (TraceError, TypeError))
    twins.both(lambda side: train(side.module, device))
    twins.assert_replayed(3)


def test_on_new_signature_error(device: str) -> None:
    twins = Twins(Net(), sample(device), device=device, options={"on_new_signature": "error"})
    with pytest.raises(SignatureError) as caught:
        twins.graphed.module(sample(device, rows=2))
    assert caught.value.id == "new-signature"
    assert "size mismatch" in caught.value.observed and "expected 5, actual 2" in caught.value.observed
    twins.both(lambda side: train(side.module, device))


def test_on_new_signature_eager(device: str) -> None:
    twins = Twins(Net(), sample(device), device=device, options={"on_new_signature": "eager"})
    with pytest.warns(fxgraph.EagerFallbackWarning, match="runs eagerly: a signature that no sample had"):
        twins.both(lambda side: side.module(sample(device, rows=2)))
    twins.both(lambda side: side.module(sample(device, rows=2)))  # one warning
    stats = twins.stats
    assert (stats.eager_calls, stats.replays, len(stats.captures)) == (2, 0, 1)


def test_on_new_signature_capture(device: str) -> None:
    twins = Twins(Net(), sample(device), device=device)
    for rows in (5, 2, 5, 2, 3):
        twins.both(lambda side, rows=rows: side.module(sample(device, rows=rows)))
    assert len(twins.stats.captures) == 3
    twins.assert_replayed(5)


# -- exceptions of the user's own -------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.fail = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(x)
        if self.fail:
            raise OwnError("of the user's own", x.shape[0])
        return y


def test_an_exception_of_the_users_own_comes_through_with_a_note(device: str) -> None:
    module = Raises().to(device)
    state = copy.deepcopy(module.state_dict())
    x, rng = sample(device), torch.get_rng_state()
    with pytest.raises(OwnError) as caught:
        make_graphed_callables(module, (x,))
    assert caught.value.args == ("of the user's own", 5)
    assert any("fxgraph" in note and "traced" in note for note in caught.value.__notes__)
    assert_same(dict(module.state_dict()), dict(state))  # BatchNorm did not count it
    assert torch.equal(torch.get_rng_state(), rng)
    assert "forward" not in vars(module)
    module.fail = False
    twins = Twins(module, sample(device), device=device)
    twins.both(lambda side: side.module(sample(device)))


def test_an_exception_of_the_users_own_at_a_later_call(device: str) -> None:
    module = Raises()
    module.fail = False
    twins = Twins(module, sample(device), device=device)

    def set_fail(side: Any, value: bool) -> None:
        side.module.fail = value

    twins.both(lambda side: side.module(sample(device)))
    twins.both(lambda side: set_fail(side, True))
    error = twins.both_raise(OwnError, lambda side: side.module(torch.ones(5, 3, device=device)))
    assert error.args == ("of the user's own", 5)
    twins.both(lambda side: set_fail(side, False))
    twins.both(lambda side: side.module(sample(device)))
    assert twins.stats.replays == 2


def test_a_failure_in_the_second_callable_leaves_the_first_alone(device: str) -> None:
    first, second = Net().to(device), Raises().to(device)
    twin = copy.deepcopy(first)
    with pytest.raises(OwnError):
        make_graphed_callables((first, second), ((sample(device),),) * 2)
    assert "forward" not in vars(second)
    assert_works_as_before(first, twin, device)


# -- what was captured ------------------------------------------------------------------------------------------------


def test_stats(device: str) -> None:
    module = make_graphed_callables(Net().to(device), (sample(device),))
    fresh = fxgraph.stats(module)
    assert (fresh.replays, fresh.eager_calls, fresh.eager_reasons) == (0, 0, {})
    assert len(fresh.captures) == 1 and "Net" in fresh.captures[0] and "forward and backward" in fresh.captures[0]
    assert fresh.pool_bytes > 0
    module(sample(device))
    assert fxgraph.stats(module).replays == 1
    assert fxgraph.stats().replays >= 1
    with pytest.raises(TypeError, match="graphed"):
        fxgraph.stats(nn.Linear(2, 2))


def test_repr_of_a_graphed_function_says_so(device: str) -> None:
    graphed = make_graphed_callables(top_level, (sample(device),))
    assert repr(graphed) == "<fxgraph graphed top_level: 1 captures>"


def test_check_of_a_graphed_callable_judges_the_original(device: str) -> None:
    module = make_graphed_callables(Net().to(device), (sample(device),))
    assert fxgraph.check(module, (sample(device),)).ok
    module.inner.register_forward_hook(lambda *_: None)
    assert fxgraph.check(module, (sample(device),)).ids == ("module-hooks",)


class Named(collections.OrderedDict):
    """As the outputs of transformers are."""


class Several(list):
    pass


@pytest.mark.parametrize("kind", [Named, Several])
def test_outputs_whose_making_needs_builtins(kind: type, device: str) -> None:
    """Dynamo's bytecode calls ``type`` and ``list``, which torch 2.11 took for missing names."""

    def function(x: torch.Tensor) -> Any:
        return Named(a=x + 1) if kind is Named else Several([x + 1])

    x = torch.randn(3, device=device)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    found, expected = graphed(x), function(x)
    assert type(found) is kind and fxgraph.stats(graphed).replays == 1
    assert torch.equal(*[out["a"] if kind is Named else out[0] for out in (found, expected)])
    assert not {"type", "list"} & function.__globals__.keys()
