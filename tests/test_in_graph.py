"""``grads="in_graph"``: what users do with parameters' gradients gives what eager gives, or is refused.

Beside these tests the state machine draws the option (``strategies.Setup.grads``).
"""

from __future__ import annotations

import gc
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from twins import Twins, assert_same

import fxgraph
from fxgraph import ReplayError, VerifyError, accumulate
from fxgraph.accumulate import Accumulator, StaticGradient

Side = types.SimpleNamespace
IN_GRAPH = {"grads": "in_graph"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


class Two(nn.Module):
    """Each output has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


@pytest.fixture
def in_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[accumulate.Pattern]]:
    """The patterns of all backwards that regions have accumulated, in their order."""
    seen: list[accumulate.Pattern] = []
    plain = Accumulator.hand_out

    def noted(self: Accumulator, parameters: Any, there: accumulate.Pattern) -> None:
        seen.append(there)
        plain(self, parameters, there)

    monkeypatch.setattr(Accumulator, "hand_out", noted)
    yield seen


def rows(device: str, count: int = 5, grad: bool = False) -> torch.Tensor:
    return torch.randn(count, 3, device=device, requires_grad=grad)


def twins_of(module: nn.Module, device: str, *samples: torch.Tensor, **options: Any) -> Twins:
    return Twins(module, *(samples or (rows(device),)), device=device, options={**IN_GRAPH, **options})


def backward(device: str, grad: bool = False) -> Callable[[Side], Any]:
    """A forward and a backward; gives the loss and the input's gradient."""

    def step(side: Side) -> Any:
        x = rows(device, grad=grad)
        out = side.module(x)
        loss = sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,)))
        loss.backward()
        return loss.detach(), x.grad

    return step


def zero(set_to_none: bool = True) -> Callable[[Side], None]:
    return lambda side: side.module.zero_grad(set_to_none=set_to_none)


def parameters(side: Side) -> list[nn.Parameter]:
    return list(side.module.parameters())


def only(there: bool, count: int = 4) -> accumulate.Pattern:
    return (there,) * count


# -- training loops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_training_loop(device: str, in_graph: list[Any], optimizer: Any, grad: bool, set_to_none: bool) -> None:
    twins = twins_of(Net(), device, rows(device, grad=grad))
    for side in (twins.eager, twins.graphed):
        side.optimizer = optimizer(side.module.parameters(), lr=0.1)
    addresses = set()

    def step(side: Side) -> Any:
        side.optimizer.zero_grad(set_to_none=set_to_none)
        seen = backward(device, grad)(side)
        side.optimizer.step()
        return seen

    for _ in range(5):
        twins.both(step)
        addresses.add(tuple(p.grad.data_ptr() for p in parameters(twins.graphed)))
    assert len(addresses) == 1
    assert in_graph == ([only(False)] * 5 if set_to_none else [only(False), *[only(True)] * 3])
    twins.assert_replayed(5)


def test_a_training_loop_with_torch_compile(device: str, in_graph: list[Any]) -> None:
    def steps(how: Callable[[nn.Module], Any]) -> list[Any]:
        torch.manual_seed(3)
        module = Net().to(device)
        call, optimizer, seen = how(module), torch.optim.SGD(module.parameters(), lr=0.1), []
        for i in range(6):
            x = rows(device, grad=True)
            call(x).square().sum().backward()
            seen.append([x.grad.clone(), *[p.grad.clone() for p in module.parameters()]])
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return [seen, *module.parameters()]

    found = steps(lambda module: torch.compile(module, backend="graphed", options=IN_GRAPH))
    assert_same(found, steps(lambda module: module))
    # The third backward accumulates by hand, for what it needs is captured after it.
    assert in_graph == [only(False), only(False), only(True), only(False), only(True)]


@pytest.mark.parametrize("count", [2, 5])
def test_gradients_accumulate_over_several_backwards(device: str, in_graph: list[Any], count: int) -> None:
    twins = twins_of(Net(), device)
    for _ in range(3):
        for _ in range(count):
            twins.both(backward(device))
        twins.both(zero())
    assert in_graph.count(only(True)) == 3 * (count - 1) - 1
    twins.assert_replayed(3 * count)


def test_clipping_and_scaling_with_infinities(device: str) -> None:
    twins = twins_of(Net(), device)
    for side in (twins.eager, twins.graphed):
        side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.1, momentum=0.9)
        side.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)

    def step(side: Side, factor: float) -> Any:
        side.optimizer.zero_grad()
        loss = (side.module(rows(device)) * factor).square().sum()
        side.scaler.scale(loss).backward()
        side.scaler.unscale_(side.optimizer)
        norm = nn.utils.clip_grad_norm_(side.module.parameters(), 0.5)
        side.scaler.step(side.optimizer)
        side.scaler.update()
        return loss.detach(), norm, side.scaler.get_scale()

    for factor in (1.0, 1e30, 1.0, 1.0, 1e30, 1.0):
        twins.both(lambda side, factor=factor: step(side, factor))
    twins.assert_replayed(6)


def test_forwards_in_flight_share_the_gradients(device: str, in_graph: list[Any]) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> None:
        first, second = side.module(rows(device)), side.module(rows(device))
        second.square().sum().backward()
        first.square().sum().backward()

    addresses = set()
    for _ in range(4):
        twins.both(step)
        addresses.add(tuple(p.grad.data_ptr() for p in parameters(twins.graphed)))
        twins.both(zero())
    assert len(addresses) == 1
    assert in_graph[-2:] == [only(False), only(True)]


def test_batches_of_several_sizes_share_the_gradients(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side, count: int) -> None:
        side.module(rows(device, count)).square().sum().backward()

    addresses = set()
    for count in (5, 2, 7, 5, 7, 2):
        twins.both(lambda side, count=count: step(side, count))
        addresses.add(tuple(p.grad.data_ptr() for p in parameters(twins.graphed)))
    assert len(addresses) == 1


# -- what may be a .grad ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_kept_is_never_overwritten(device: str, in_graph: list[Any]) -> None:
    """The first time it is noticed costs a replay; then there is other memory, and regions for it."""
    twins = twins_of(Net(), device)

    def keep(side: Side) -> None:
        backward(device)(side)
        side.kept = [*getattr(side, "kept", []), side.module.inner.weight.grad, side.module.outer.weight.grad.t()]
        side.module.zero_grad()

    for _ in range(4):
        twins.both(keep)
        assert_same(twins.graphed.kept, twins.eager.kept)
    for side in (twins.eager, twins.graphed):
        side.kept.clear()
    before = len(in_graph)
    for _ in range(3):
        twins.both(backward(device))
        twins.both(zero())
    assert len(in_graph) >= before + 2


@pytest.mark.parametrize("how", ["list", "detached", "numpy", "saved by autograd", "of another tensor"])
def test_ways_to_keep_a_gradient(device: str, how: str) -> None:
    if how == "numpy" and device == "cuda":
        pytest.skip("numpy arrays lie in host memory")
    twins = twins_of(Net(), device)
    twins.both(backward(device))

    def keep(side: Side) -> None:
        grad = side.module.inner.weight.grad
        if how == "list":
            side.kept = [grad]
        elif how == "detached":
            side.kept = [grad.detach()]
        elif how == "numpy":
            side.kept = [torch.from_numpy(grad.numpy())]
        elif how == "saved by autograd":
            factor = torch.ones_like(grad).requires_grad_()
            side.kept = [(factor * grad).sum(), factor]
        else:
            other = torch.zeros_like(grad).requires_grad_()
            other.grad = grad
            side.kept = [other]
        side.module.zero_grad()

    def look(side: Side) -> Any:
        if how == "saved by autograd":
            return torch.autograd.grad(*side.kept)
        return side.kept[0].grad if how == "of another tensor" else side.kept

    twins.both(keep)
    twins.both(backward(device))
    twins.both(look)


@pytest.mark.parametrize("where", ["all", "one"])
def test_a_gradient_of_the_users_own_is_added_to_in_place(device: str, where: str) -> None:
    twins = twins_of(Net(), device)

    def assign(side: Side) -> None:
        for p in parameters(side)[: None if where == "all" else 1]:
            p.grad = torch.ones_like(p)
        side.mine = side.module.inner.weight.grad

    twins.both(assign)
    for _ in range(3):
        twins.both(backward(device, grad=True))
        for side in (twins.eager, twins.graphed):
            assert side.module.inner.weight.grad is side.mine


def test_a_gradient_that_was_there_before_graphing(device: str) -> None:
    module = Net().to(device)
    module(rows(device)).sum().backward()
    twins = twins_of(module, device)
    for _ in range(3):
        twins.both(backward(device))


def other_memory(grad: torch.Tensor) -> None:
    grad.data = grad.data * 2


def transposed(grad: torch.Tensor) -> None:
    grad.t_()


def with_history(grad: torch.Tensor) -> None:
    with torch.enable_grad():
        grad.add_(torch.ones_like(grad).requires_grad_())


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("change", [other_memory, transposed, with_history])
@pytest.mark.parametrize("keep", [True, False])
def test_a_gradient_that_the_user_has_changed_in_all_ways(
    device: str, change: Callable[[torch.Tensor], None], keep: bool
) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    twins = twins_of(Square(), device)

    def step(side: Side) -> None:
        backward(device)(side)
        change(side.module.weight.grad)
        if not keep:
            side.module.weight.grad = None
        backward(device)(side)
        side.module.weight.grad.detach_()

    for _ in range(3):
        twins.both(step)


def test_a_sparse_gradient_of_the_users_own(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> Any:
        side.module.inner.weight.grad = torch.eye(4, 3, device=device).to_sparse()
        return backward(device)(side)

    for _ in range(2):
        twins.both(step)


def test_writes_of_a_region_are_counted_like_eagers(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> Any:
        backward(device)(side)
        return side.module.inner.weight.grad._version

    assert [twins.both(step) for _ in range(4)] == [0, 1, 2, 3]


def test_capturing_for_a_pattern_leaves_gradients_alone(device: str) -> None:
    twins = twins_of(Net(), device)
    twins.both(backward(device))
    twins.both(backward(device))
    twins.both(lambda side: side.module(rows(device)).detach())  # here the region that adds is captured
    (program,) = twins.graphed.module.forward.programs()
    (capture,) = program.captures.values()
    assert set(capture.slots[0].accumulating) == {only(False), only(True)}
    assert [p.grad._version for p in parameters(twins.graphed)] == [1] * 4


# -- which parameters get one -----------------------------------------------------------------------------------------


def test_no_gradient_where_none_flows(device: str) -> None:
    twins = twins_of(Two(), device)
    for which in (0, 1, 0):
        twins.both(lambda side, which=which: side.module(rows(device))[which].sum().backward())
        assert twins.graphed.module.unused.grad is None
        twins.both(zero())
    twins.both(lambda side: side.module(rows(device))[0].sum().backward())
    assert twins.graphed.module.right.weight.grad is None
    for _ in range(3):
        twins.both(backward(device))
    twins.assert_replayed(7)


def test_patterns_of_gradients_that_are_there(device: str, in_graph: list[Any]) -> None:
    """Some are None, some are not, in more ways than there are to be regions."""
    twins = twins_of(Net(), device)
    for pattern in [*itertools.product([True, False], repeat=4)] * 2:

        def step(side: Side, pattern: tuple[bool, ...] = pattern) -> None:
            for parameter, there in zip(parameters(side), pattern, strict=True):
                if not there:
                    parameter.grad = None
            backward(device)(side)

        twins.both(step)
    (program,) = twins.graphed.module.forward.programs()
    (capture,) = program.captures.values()
    assert len(capture.slots[0].accumulating) == 4
    assert len(set(in_graph)) == 4


def test_parameters_frozen_before_the_backward_get_none(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> None:
        loss = side.module(rows(device)).square().sum()
        side.module.inner.weight.requires_grad_(False)
        loss.backward()
        side.module.inner.weight.requires_grad_(True)

    for _ in range(2):
        twins.both(step)
        twins.both(backward(device))


def test_frozen_parameters(device: str) -> None:
    twins = twins_of(Net(), device)
    for frozen in (True, False, True):

        def freeze(side: Side, frozen: bool = frozen) -> None:
            side.module.inner.requires_grad_(not frozen)

        twins.both(freeze)
        for _ in range(2):
            twins.both(backward(device))


def test_parameters_replaced_at_the_same_address(device: str) -> None:
    twins = twins_of(Net(), device)
    for _ in range(3):

        def replace(side: Side) -> None:
            side.module.inner.weight = nn.Parameter(side.module.inner.weight.data)

        twins.both(replace)
        for _ in range(2):
            twins.both(backward(device))
    twins.assert_replayed(6)


def test_a_module_that_changes_its_dtype(device: str) -> None:
    twins = twins_of(Net(), device)
    for dtype in (torch.float32, torch.float64, torch.float32):

        def convert(side: Side, dtype: torch.dtype = dtype) -> None:
            side.module.to(dtype)

        twins.both(convert)
        for _ in range(2):
            twins.both(lambda side, dtype=dtype: side.module(rows(device).to(dtype)).square().sum().backward())


def test_parameters_that_are_no_leaves(device: str) -> None:
    """As FullyShardedDataParallel with ``use_orig_params`` puts views into a module."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    twins = twins_of(Inner(), device)
    for side in (twins.eager, twins.graphed):
        side.flat = torch.arange(6.0, device=device, requires_grad=True)

    def step(side: Side) -> Any:
        side.module._parameters["weight"] = side.flat[2:5]
        side.module(rows(device)).square().sum().backward()
        side.module._parameters["weight"] = nn.Parameter(torch.ones(3, device=device))
        return side.flat.grad

    for _ in range(3):
        twins.both(step)


@pytest.mark.parametrize("layout", ["channels last", "transposed", "with gaps"])
def test_gradients_have_the_layout_that_torch_promises(device: str, in_graph: list[Any], layout: str) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.arange(96.0, device=device).view(2, 3, 4, 4)
            if layout == "channels last":
                weight = weight.contiguous(memory_format=torch.channels_last)
            elif layout == "transposed":
                weight = weight.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2)
            else:
                weight = weight.repeat_interleave(2, dim=3)[..., ::2]
            self.weight = nn.Parameter(weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    eager = Scale()
    graphed = fxgraph.make_graphed_callables(Scale(), (torch.ones(2, 3, 4, 4, device=device),), options=IN_GRAPH)
    for _ in range(3):
        x = torch.randn(2, 3, 4, 4, device=device)
        for module in (eager, graphed):
            module(x).square().sum().backward()
        assert_same(graphed.weight.grad, eager.weight.grad)
        assert graphed.weight.grad.stride() == eager.weight.grad.stride()
    assert len(in_graph) == 2


def test_sparse_gradients(device: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(words))

    words = torch.randint(0, 7, (5,), device=device)
    torch.manual_seed(1)
    module, expected = Words().to(device), Words().to(device)
    expected.load_state_dict(module.state_dict())
    graphed = torch.compile(module, backend="graphed", options=IN_GRAPH)
    for _ in range(3):
        for call in (graphed, expected):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*unsupported-layout", fxgraph.EagerFallbackWarning)
                call(words).square().sum().backward()
        assert module.table.weight.grad.is_sparse
        assert torch.equal(module.table.weight.grad.to_dense(), expected.table.weight.grad.to_dense())
        assert torch.equal(module.head.weight.grad, expected.head.weight.grad)


# -- shared parameters ------------------------------------------------------------------------------------------------


def test_a_tuple_whose_callables_share_parameters(device: str, in_graph: list[Any]) -> None:
    """As an embedding tied to the head: the second backward adds to what the first has written."""

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        return first.to(device), second.to(device)

    eager, graphed = make(), make()
    fxgraph.make_graphed_callables(graphed, ((rows(device),), (rows(device, grad=True),)), options=IN_GRAPH)
    for _ in range(5):
        x = rows(device)
        for first, second in (eager, graphed):
            second(first(x).tanh()).square().sum().backward()
        for one, other in zip(eager, graphed, strict=True):
            for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
                assert_same(q.grad, p.grad, name)
                p.grad = q.grad = None
    assert in_graph[-2:] == [(False, False), (True, False)]


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_parameter_used_outside_too(device: str, zeroed: bool) -> None:
    """Bit by bit after ``zero_grad``; else the sum of three is rounded in another order than eager's."""
    twins = twins_of(Net(), device)

    def step(side: Side) -> Any:
        if zeroed:
            side.module.zero_grad()
        loss = side.module(rows(device)).square().sum() + side.module.inner.weight.square().sum()
        loss.backward()
        return loss.detach()

    for _ in range(4):
        twins.both(step, exact=zeroed)
    twins.assert_replayed(4)


def test_a_parameter_in_two_captured_parts(device: str, in_graph: list[Any]) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.inner(x).tanh()
            return first, self.inner(first).tanh()  # an output that feeds another ends a part

    twins = twins_of(Parts(), device)
    for _ in range(4):
        twins.both(backward(device))
        twins.both(zero())
    assert in_graph[-2:] == [(False, False), (True, True)]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")  # which is the point
@pytest.mark.parametrize("outside", ["another graphed callable", "eager"])
def test_gradients_that_come_on_several_streams(outside: str) -> None:
    """One slow backward and one quick one accumulate into the same parameter, each on the stream of its forward."""

    class Times(nn.Module):
        def __init__(self, weight: nn.Parameter, often: int) -> None:
            super().__init__()
            self.weight, self.often = weight, often

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.often):
                x = (x @ self.weight).sin()
            return x

    def make() -> tuple[nn.Parameter, list[nn.Module]]:
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(512, 512, device="cuda") / 16)
        return weight, [Times(weight, 20), Times(weight, 1)]

    x = torch.randn(2048, 512, device="cuda")
    expected, eager = make()
    weight, modules = make()
    modules[0] = fxgraph.make_graphed_callables(modules[0], (x,), options=IN_GRAPH)
    if outside != "eager":
        modules[1] = fxgraph.make_graphed_callables(modules[1], (x,), options=IN_GRAPH)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i in range(10):
        for parts in (modules, eager):
            losses = []
            for part, stream in zip(parts, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    losses.append(part(x).square().mean())
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            sum(losses[::-1] if i % 2 else losses).backward()
        torch.testing.assert_close(weight.grad, expected.grad)
        if i % 3 == 2:
            weight.grad = expected.grad = None


# -- hooks ------------------------------------------------------------------------------------------------------------


def tensor_hook(parameter: nn.Parameter, log: list[Any]) -> Any:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        log.append(grad.clone())
        return grad * 2

    return parameter.register_hook(hook), None


def post_accumulate_hook(parameter: nn.Parameter, log: list[Any]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone())), None


def node_hook(parameter: nn.Parameter, log: list[Any]) -> Any:
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    return node.register_hook(lambda *_: log.append(parameter.grad.clone())), node


def node_prehook(parameter: nn.Parameter, log: list[Any]) -> Any:
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    return node.register_prehook(lambda grads: log.append(grads[0].clone())), node


HOOKS = [tensor_hook, post_accumulate_hook, node_hook, node_prehook]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_parameters_are_called(device: str, in_graph: list[Any], register: Callable[..., Any]) -> None:
    twins = twins_of(Net(), device)
    twins.both(backward(device))

    def hook(side: Side) -> None:
        side.log = []
        side.handle, side.node = register(side.module.inner.weight, side.log)

    twins.both(hook)
    for _ in range(3):
        twins.both(backward(device, grad=True))
        twins.both(lambda side: side.log)
    assert len(twins.graphed.log) == 3
    assert len(in_graph) == 1

    def unhook(side: Side) -> None:
        side.handle.remove()
        side.node = None

    twins.both(unhook)
    for _ in range(3):
        twins.both(backward(device, grad=True))
    assert len(in_graph) >= 3
    twins.assert_replayed(7)


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_that_comes_after_the_forward_is_refused(device: str, register: Callable[..., Any]) -> None:
    twins = twins_of(Net(), device)
    weight, log = twins.graphed.module.inner.weight, []
    out = twins.graphed.module(rows(device))
    handle, node = register(weight, log)
    with pytest.raises(ReplayError, match=r"\[hook-after-forward\].*\n.*shape \(4, 3\)"):
        out.sum().backward(retain_graph=True)
    assert weight.grad is None
    assert not log
    handle.remove()
    del node
    out.sum().backward()
    assert weight.grad is not None


def test_a_hook_after_the_forward_is_refused_where_gradients_are_asked_for(device: str) -> None:
    twins = twins_of(Net(), device)
    weight = twins.graphed.module.inner.weight
    out = twins.graphed.module(rows(device))
    weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ReplayError, match="hook-after-forward"):
        torch.autograd.grad(out.sum(), weight)


def test_an_old_loss_of_eagers_does_not_keep_gradients_out_of_the_graph(device: str, in_graph: list[Any]) -> None:
    module = Net().to(device)
    loss = module(rows(device)).square().sum()
    loss.backward()
    module.zero_grad()
    module = fxgraph.make_graphed_callables(module, (rows(device),), options=IN_GRAPH)
    for _ in range(3):
        loss = module(rows(device)).square().sum()
        loss.backward()
        module.zero_grad()
    assert in_graph == [only(False)] * 3


# -- asking for some gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("given", ["parameters", "one", "twice", "with the input", "the input"])
def test_gradients_that_are_asked_for(device: str, given: str, create_graph: bool) -> None:
    twins = twins_of(Net(), device, rows(device, grad=True))

    def ask(side: Side) -> Any:
        x = rows(device, grad=True)
        loss = side.module(x).square().sum()
        wanted = {
            "parameters": parameters(side),
            "one": parameters(side)[2:3],
            "twice": [parameters(side)[2], parameters(side)[0], parameters(side)[2]],
            "with the input": [parameters(side)[1], x, parameters(side)[0]],
            "the input": [x],
        }[given]
        found = torch.autograd.grad(loss, wanted, create_graph=create_graph)
        assert all(p.grad is None for p in parameters(side))
        if create_graph:
            sum(g.square().sum() for g in found).backward()
            second = [None if p.grad is None else p.grad.clone() for p in parameters(side)]
            side.module.zero_grad()
            return [g.detach() for g in found], second, x.grad
        return found

    for _ in range(3):
        twins.both(ask, exact=not create_graph)


def test_gradients_are_asked_for_and_then_accumulated(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> Any:
        loss = side.module(rows(device)).square().sum()
        found = torch.autograd.grad(loss, parameters(side), retain_graph=True)
        loss.backward()
        return found

    for _ in range(3):
        twins.both(step)


def test_the_gradients_of_several_calls_are_asked_for(device: str) -> None:
    twins = twins_of(Net(), device)

    def ask(side: Side) -> Any:
        loss = (side.module(rows(device)) * side.module(rows(device))).sum() + side.module.inner.bias.square().sum()
        return torch.autograd.grad(loss, parameters(side))

    for _ in range(2):
        twins.both(ask, exact=False)


def test_batches_of_gradients(device: str) -> None:
    twins = twins_of(Net(), device)

    def ask(side: Side) -> Any:
        out = side.module(rows(device, 2))
        upstream = torch.eye(6, device=device).view(6, 2, 3)
        return torch.autograd.grad(out, parameters(side), upstream, is_grads_batched=True)

    twins.both(ask)


def test_unused_parameters_are_asked_for(device: str) -> None:
    twins = twins_of(Two(), device)

    def ask(side: Side, **how: Any) -> Any:
        left, _ = side.module(rows(device))
        return torch.autograd.grad(left.sum(), parameters(side), **how)

    twins.both_raise(RuntimeError, ask, "appears to not have been used in the graph")
    twins.both(lambda side: ask(side, allow_unused=True))
    twins.both(lambda side: ask(side, materialize_grads=True))


def test_edges_are_asked_for(device: str) -> None:
    twins = twins_of(Net(), device)

    def ask(side: Side) -> Any:
        loss = side.module(rows(device)).sum()
        edges = [torch.autograd.graph.get_gradient_edge(p) for p in parameters(side)]
        return torch.autograd.grad([torch.autograd.graph.get_gradient_edge(loss)], edges, [torch.ones_like(loss)])

    twins.both(ask)


@pytest.mark.parametrize("which", [[0], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("with_input", [False, True])
def test_a_backward_into_some_leaves(device: str, which: list[int], with_input: bool) -> None:
    twins = twins_of(Net(), device, rows(device, grad=True))

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        wanted = [*[parameters(side)[i] for i in which], *([x] if with_input else [])]
        side.module(x).square().sum().backward(inputs=wanted)
        return x.grad

    for _ in range(3):
        twins.both(step)
        twins.both(backward(device))


def test_the_graph_of_a_parameter_without_a_graphed_call(device: str) -> None:
    twins = twins_of(Net(), device)
    twins.both(lambda side: torch.autograd.grad(side.module.inner.weight.square().sum(), side.module.inner.weight))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True will create a reference cycle")
@pytest.mark.parametrize("grad", [True, False])
def test_backward_with_create_graph(device: str, grad: bool) -> None:
    twins = twins_of(Net(), device, rows(device, grad=grad))

    def step(side: Side) -> Any:
        side.module.zero_grad()
        x = rows(device, grad=grad)
        loss = side.module(x).square().sum()
        loss.backward(create_graph=True, retain_graph=True)
        first = [p.grad.detach().clone() for p in parameters(side)]
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in parameters(side))
        seconds = torch.autograd.grad(penalty, parameters(side))
        for p in parameters(side):
            p.grad = p.grad.detach()  # no cycle
        return first, seconds

    for _ in range(2):
        twins.both(step, exact=False)


def test_two_backwards_through_one_forward(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> None:
        loss = side.module(rows(device)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(3):
        twins.both(step)

    def once_more(side: Side) -> None:
        loss = side.module(rows(device)).square().sum()
        loss.backward()
        loss.backward()

    twins.both_raise(RuntimeError, once_more, "backward through the graph a second time")


# -- together with other parts of torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint(device: str, reentrant: bool) -> None:
    twins = twins_of(Net(), device, rows(device, grad=True))

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        checkpoint(side.module, x, use_reentrant=reentrant).square().sum().backward()
        return x.grad

    for _ in range(4):
        twins.both(step)


def test_with_functional_transforms(device: str) -> None:
    twins = twins_of(Net(), device)

    def step(side: Side) -> Any:
        return torch.func.grad(lambda x: side.module(x).square().sum())(rows(device))

    with pytest.warns(fxgraph.EagerFallbackWarning, match=r"torch\.func"):
        twins.both(step)
    twins.both(backward(device))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_distributed_data_parallel_sees_every_gradient(wrapped_first: bool, in_graph: list[Any]) -> None:
    """Its reducer hooks the nodes that accumulate, in C++; here a hook of its own doubles what is reduced."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def double(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations, which must be no strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    def make(graph: bool) -> DistributedDataParallel:
        torch.manual_seed(1)
        module = Whole()
        if graph and not wrapped_first:
            fxgraph.make_graphed_callables(module.net, (rows("cpu"),), options=IN_GRAPH)
        parallel = DistributedDataParallel(module)
        parallel.register_comm_hook(None, double)
        if graph and wrapped_first:
            fxgraph.make_graphed_callables(module.net, (rows("cpu"),), options=IN_GRAPH)
        return parallel

    eager, graphed = make(False), make(True)
    for i in range(4):
        x = rows("cpu")
        for module in (eager, graphed):
            module(x).square().sum().backward()
        for p, q in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        if i % 2:
            eager.zero_grad()
            graphed.zero_grad()
    assert not in_graph


def test_verification_compares_what_a_region_has_accumulated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = twins_of(Net(), device, verify=3)
    for _ in range(3):
        twins.both(backward(device))
    plain = accumulate.accumulating_graph

    def wrong(*given: Any) -> torch.fx.GraphModule:
        graph = plain(*given)
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.List):
            node.kwargs = {"alpha": 2}
        graph.recompile()
        return graph

    monkeypatch.setattr("fxgraph.slots.accumulating_graph", wrong)
    module = fxgraph.make_graphed_callables(Net().to(device), (rows(device),), options={**IN_GRAPH, "verify": 3})
    for _ in range(2):
        module(rows(device)).square().sum().backward()
    with pytest.raises(VerifyError, match=r"\[verify-backward\]"):
        module(rows(device)).square().sum().backward()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_static_gradients_go_with_the_graphed_callable(device: str) -> None:
    module = fxgraph.make_graphed_callables(Net().to(device), (rows(device),), options=IN_GRAPH)
    module(rows(device)).sum().backward()
    (program,) = module.forward.programs()
    (capture,) = program.captures.values()
    static: weakref.ref[StaticGradient] = weakref.ref(capture.accumulator.statics[0])
    weight = weakref.ref(module.inner.weight)
    grad = module.inner.weight.grad
    before = grad.clone()
    fxgraph.ungraph(module)
    del program, capture
    gc.collect()
    assert static() is None
    assert torch.equal(grad, before)
    del module
    gc.collect()
    assert weight() is None


def test_big_gradients_are_accumulated_before_the_end_of_the_backward(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulate, "CHUNK_BYTES", 1)
    twins = twins_of(Net(), device)
    for _ in range(4):
        twins.both(backward(device))
    (program,) = twins.graphed.module.forward.programs()
    (capture,) = program.captures.values()
    graph = accumulate.accumulating_graph(capture.plan.backward, capture.accumulator, only(True)).graph
    sums = graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_add_.List)
    assert len(sums) == 4
    nodes = list(graph.nodes)
    assert nodes.index(sums[0]) < len(nodes) - 5


def test_products_of_matrices_are_computed_where_the_gradient_is_to_be(device: str) -> None:
    twins = twins_of(Net(), device)
    (program,) = twins.graphed.module.forward.programs()
    (capture,) = program.captures.values()
    graph = accumulate.accumulating_graph(capture.plan.backward, capture.accumulator, only(False)).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.out)) == 2
    (copies,) = graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_copy_.default)
    assert len(copies.args[0]) == 2  # the biases
    graph.lint()
