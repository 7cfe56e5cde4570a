"""Callables that are alike share one plan; whatever could make a difference keeps them apart."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxgraph
from fxgraph import sharing, trace
from fxgraph.graphed import GraphedCallable


class Block(nn.Module):
    def __init__(self, rate: float = 0.25, factor: float = 2.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(rate))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.body(x)


def counted(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every call of this function of ``fxgraph.trace``."""
    made: list[Any] = []
    original = getattr(trace, name)

    def function(*args: Any, **how: Any) -> Any:
        made.append(args)
        return original(*args, **how)

    monkeypatch.setattr(trace, name, function)
    return made


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every joint trace."""
    return counted("export", monkeypatch)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every function that Dynamo reads."""
    return counted("read", monkeypatch)


def plans(graphed: Any) -> list[Any]:
    callables = [g if isinstance(g, GraphedCallable) else g.forward for g in graphed]
    return [capture.plan for c in callables for program in c.programs() for capture in program.captures.values()]


def train(blocks: Any, device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    parameters = [p for block in blocks for p in block.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    seen = []
    for _ in range(3):
        x = torch.randn(5, 8, device=device)
        optimizer.zero_grad()
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        optimizer.step()
        seen.append(x.detach())
    return [*seen, *[p.detach() for p in parameters], *[b for block in blocks for b in block.buffers()]]


def test_equal_blocks_are_read_and_lowered_once_and_train_as_in_eager(
    exports: list[Any], read: list[Any], device: str
) -> None:
    eager = tuple(Block().to(device) for _ in range(4))
    sample = torch.randn(5, 8, device=device, requires_grad=True)
    twins = copy.deepcopy(eager)
    graphed = fxgraph.make_graphed_callables(twins, ((sample,),) * 4)
    assert len(read) == len(exports) == 1
    assert len(set(map(id, plans(graphed)))) == 1
    # The first block's input needs no gradient when it trains, so it is captured once more.
    torch.testing.assert_close(train(graphed, device), train(eager, device), rtol=0, atol=0)


def test_equal_blocks_are_lowered_once_for_inductor_and_compiled_each(exports: list[Any], device: str) -> None:
    eager = tuple(Block().to(device) for _ in range(3))
    sample = torch.randn(5, 8, device=device, requires_grad=True)
    options = {"kernels": "inductor"}
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), ((sample,),) * 3, options=options)
    assert len(exports) == 1
    (first, *_) = shared = plans(graphed)
    assert first.joint.for_inductor and len(set(map(id, shared))) == 1
    torch.testing.assert_close(train(graphed, device), train(eager, device))


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
def test_equal_parts_are_lowered_once(exports: list[Any], device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        return (y + torch.bincount((y.sum(1) > 0).long(), minlength=2).sum()).tanh().exp()

    x = torch.randn(3, 4, device=device)
    first, second = fxgraph.make_graphed_callables((function, function), ((x,), (x,)))
    assert len(exports) == 2  # before and after
    torch.testing.assert_close((first(x), second(x)), (function(x), function(x)), rtol=0, atol=0)


def frozen(block: Block) -> Block:
    block.body[0].bias.requires_grad_(False)
    return block


def tied(block: Block) -> Block:
    block.body[1].bias = block.body[1].weight
    return block


def transposed(block: Block) -> Block:
    block.body[0].weight = nn.Parameter(torch.randn(8, 8).t())
    return block


def of_one_memory(block: Block) -> Block:
    memory = torch.randn(16)
    block.body[1].weight, block.body[1].bias = nn.Parameter(memory[:8]), nn.Parameter(memory[8:])
    return block


# What differs from Block(): the block, and a change of the sample.
OTHERS: dict[str, tuple[Callable[[], Block], Callable[[torch.Tensor], torch.Tensor]]] = {
    "rate": (lambda: Block(rate=0.5), lambda x: x),
    "constant": (lambda: Block(factor=3.0), lambda x: x),
    "sign of a zero": (lambda: Block(factor=-0.0), lambda x: x),
    "type of a constant": (lambda: Block(factor=2), lambda x: x),
    "training": (lambda: Block().eval(), lambda x: x),
    "frozen": (lambda: frozen(Block()), lambda x: x),
    "tied": (lambda: tied(Block()), lambda x: x),
    "strides": (lambda: transposed(Block()), lambda x: x),
    "memory": (lambda: of_one_memory(Block()), lambda x: x),
    "rows": (Block, lambda x: x[:4].clone()),
    "a view of more": (Block, lambda x: torch.cat([x, x])[:5]),
    "an offset": (Block, lambda x: torch.cat([x, x])[5:]),
    "gradient of the input": (Block, lambda x: x.clone().requires_grad_()),
    "no leaf": (Block, lambda x: x.clone().requires_grad_() * 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_planned_by_itself(name: str, exports: list[Any]) -> None:
    make, change = OTHERS[name]
    x = torch.randn(5, 8)
    base = Block(factor=0.0) if name == "sign of a zero" else Block()
    graphed = fxgraph.make_graphed_callables((base, make()), ((x,), (change(x),)), allow_unused_input=True)
    assert len(exports) == 2
    first, second = plans(graphed)
    assert first is not second


class Child(Block):
    """Another class with the same forward."""


READ_APART = {
    **{
        name: OTHERS[name] for name in ("sign of a zero", "type of a constant", "training", "frozen", "tied", "strides")
    },
    **{name: OTHERS[name] for name in ("rows", "gradient of the input")},
    "class": (Child, lambda x: x),
}


@pytest.mark.parametrize("name", READ_APART)
def test_what_differs_in_python_is_read_by_itself(name: str, read: list[Any]) -> None:
    make, change = READ_APART[name]
    x = torch.randn(5, 8)
    base = Block(factor=0.0) if name == "sign of a zero" else Block()
    fxgraph.make_graphed_callables((base, make()), ((x,), (change(x),)), allow_unused_input=True)
    assert len(read) == 2


def test_a_change_of_one_of_several_that_were_read_once_is_noticed(read: list[Any], device: str) -> None:
    eager = tuple(Block(rate=0.0).to(device) for _ in range(3))
    x = torch.randn(5, 8, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), ((x,),) * 3)
    assert len(read) == 1
    for blocks in (eager, graphed):
        blocks[0].factor = 3.0
        blocks[1].body[2] = nn.Tanh()
        blocks[2].body[0].weight = nn.Parameter(blocks[2].body[0].weight.detach() * 2)
    for block, twin in zip(eager, graphed, strict=True):
        torch.testing.assert_close(twin(x), block(x), rtol=0, atol=0)
        torch.testing.assert_close(twin(x), block(x), rtol=0, atol=0)


def test_a_callable_outlives_the_one_that_was_read(device: str) -> None:
    eager = Block(rate=0.0).to(device)
    x = torch.randn(5, 8, device=device)
    first, second = fxgraph.make_graphed_callables((Block(rate=0.0).to(device), copy.deepcopy(eager)), ((x,), (x,)))
    fxgraph.ungraph(first)
    del first
    gc.collect()
    torch.testing.assert_close(second(x), eager(x), rtol=0, atol=0)
    assert fxgraph.stats(second).replays == 1


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def test_inputs_that_share_memory_are_planned_by_themselves(exports: list[Any]) -> None:
    x, y = torch.randn(4), torch.randn(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        fxgraph.make_graphed_callables((twice, twice, twice), ((x, y), (y, x), (x, x)))
    assert len(exports) == 2


@torch.library.custom_op("fxgraph_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2


opaque.register_fake(torch.empty_like)


class Shift(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def key(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    traced = trace.read(function, args, {})
    assert traced.graph is not None
    return sharing.key_of(traced.graph, traced.specs, traced.flat_inputs(args, {}))


def test_what_is_not_torchs_own_has_no_key() -> None:
    x = torch.randn(3)
    assert key(lambda x: x.sin(), x) is not None
    assert key(lambda x: opaque(x), x) is None
    assert key(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), x) is None
    torch._dynamo.mark_dynamic(marked := torch.randn(3), 0)
    assert key(lambda x: x.sin(), marked) is None


def test_the_state_of_torch_is_part_of_the_key() -> None:
    function = torch.nn.functional.relu
    x = torch.randn(3)

    def relu(x: torch.Tensor) -> torch.Tensor:
        return function(x) * 2

    plain = key(relu, x)
    assert plain == key(relu, torch.randn(3))
    with torch.no_grad():
        assert key(relu, x) != plain
    with torch.autocast("cpu", torch.bfloat16):
        assert key(relu, x) != plain
    with torch.backends.cudnn.flags(enabled=False):
        assert key(relu, x) != plain
    torch.use_deterministic_algorithms(True)
    try:
        assert key(relu, x) != plain
    finally:
        torch.use_deterministic_algorithms(False)
    traced = trace.read(relu, (x,), {})
    assert traced.graph is not None
    with Shift():
        assert sharing.key_of(traced.graph, traced.specs, (x,)) is None


def test_what_is_planned_for_inductor_is_apart() -> None:
    x = torch.ones(3)
    graph, specs = fx.symbolic_trace(lambda x: x.sin()), [trace.InputSpec(trace.InputKind.USER_INPUT, "x")]
    keys = [sharing.key_of(graph, specs, [x], for_inductor) for for_inductor in (False, True, True)]
    assert keys[0] is not None
    assert keys[0] != keys[1] == keys[2]


def test_nothing_is_kept_past_the_call(exports: list[Any]) -> None:
    x = torch.randn(5, 8)
    (graphed,) = fxgraph.make_graphed_callables((Block(),), ((x,),))
    assert graphed.forward.pools.plans is None
    fxgraph.make_graphed_callables((Block(),), ((x,),))
    assert len(exports) == 2
