"""Parameters that are swapped (``torch.utils.swap_tensors``), which torch refuses where there is a weak reference."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same, state_of

import fxgraph
from fxgraph._torch_compat.storage import Watched


class Net(nn.Module):
    """Of two graphs if it prints, which ends Dynamo's."""

    def __init__(self, *, prints: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.prints = prints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        if self.prints:
            print("", end="")  # noqa: T201
        return self.last(x * 2)


def net(device: str, *, prints: bool = False) -> nn.Module:
    return Net(prints=prints).to(device)


def train(module: nn.Module, device: str) -> Any:
    torch.manual_seed(0)
    x = torch.randn(3, 4, device=device, dtype=next(module.parameters()).dtype)
    loss = module(x).square().sum()
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    module = getattr(module, "_orig_mod", module)
    return loss.detach(), state_of(module)


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def collect_readings(entry: str) -> None:
    """Where a graph ends early, Dynamo leaves what it had read in cycles, with weak references to the tensors."""
    if entry in ("in parts", "compile"):
        gc.collect()


ENTRIES = ("autograd", "in_graph", "inductor", "in parts", "compile")


def graphed_twin(eager: nn.Module, entry: str, device: str) -> Any:
    module: Any = copy.deepcopy(eager)
    if entry == "compile":
        return torch.compile(module, backend="graphed")
    options = {"grads": "in_graph"} if entry == "in_graph" else {}
    options |= {"kernels": "inductor"} if entry == "inductor" else {}
    return fxgraph.make_graphed_callables(module, (torch.randn(3, 4, device=device),), options=options)


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
@pytest.mark.parametrize("entry", ENTRIES)
def test_nothing_refers_weakly_to_the_users_tensors(entry: str, device: str) -> None:
    module = net(device, prints=entry == "in parts")
    graphed = graphed_twin(module, entry, device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed(x).sum().backward()
    for tensor in (x, *graphed.parameters(), *graphed.buffers()):
        collect_readings(entry)
        found = weakref.getweakrefs(tensor)
        assert not found, [str(holder)[:200] for reference in found for holder in gc.get_referrers(reference)]


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "inductor"])
def test_a_swap_is_noticed(entry: str, device: str) -> None:
    gc.collect()
    before = fxgraph.stats().eager_calls  # of what other tests have left
    eager = net(device, prints=entry == "in parts")
    graphed = graphed_twin(eager, entry, device)
    for other in (None, torch.float32, torch.float64, torch.float32):
        collect_readings(entry)
        for module in (eager, graphed):
            for parameter in module.parameters():
                if other is not None:
                    value = nn.Parameter(parameter.detach().to(other) * 3)
                    parameter.grad = None
                    torch.utils.swap_tensors(parameter, value)
            if other is not None:
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        torch.utils.swap_tensors(buffer, buffer.to(other) + 0.5)
        for _ in range(2):
            assert_same(train(graphed, device), train(eager, device), f"swapped for {other}")
    if entry != "in parts":  # where each call counts, for what it prints
        assert fxgraph.stats().eager_calls <= before


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
def test_conversions_and_loads_that_swap(grads: str, device: str) -> None:
    eager = net(device)
    graphed = graphed_twin(eager, grads, device)
    saved = {name: value * 2 for name, value in eager.state_dict().items()}
    for step in (
        lambda module: None,
        lambda module: module.double(),
        lambda module: module.load_state_dict(saved),
        lambda module: module.float(),
        lambda module: module.load_state_dict(saved),
    ):
        for module in (eager, graphed):
            module.zero_grad()
            step(module)
        for _ in range(2):
            assert_same(train(graphed, device), train(eager, device))
    stats = fxgraph.stats(graphed)
    assert (stats.replays, stats.eager_calls) == (10, 0)


@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
def test_a_swap_between_forward_and_backward_is_refused_and_keeps_nothing(grads: str, device: str) -> None:
    """In eager torch refuses the swap where something holds the parameter, or the backward after it."""
    options = {"grads": grads, "max_in_flight": 1, "max_captures": 2}
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(net(device), (x,), options=options)
    held = []
    for _ in range(6):
        out = graphed(x)
        with pytest.raises(RuntimeError, match=r"poisoned by swap_tensors|\[parameter-replaced\]|use_count"):
            for parameter in graphed.parameters():
                torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 3))
            out.sum().backward()
        del out
        graphed.zero_grad()
        gc.collect()
        graphed(x).sum().backward()
        held.append(fxgraph.stats(graphed).pool_bytes)
    assert fxgraph.stats(graphed).eager_calls == 0  # the slot was given back each time
    assert len(set(held[2:])) == 1, held


def test_who_holds_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watched = Watched.of(parameter)
    assert Watched.of(parameter) is watched and watched.held
    loss = parameter.exp().sum()  # autograd's node holds it
    del parameter
    assert watched.held
    del loss
    gc.collect()
    assert not watched.held
    module = nn.Linear(2, 2)
    watched = Watched.of(module.weight)
    assert watched.held
    del module
    gc.collect()
    assert not watched.held


def test_captures_of_parameters_that_are_gone_are_released(device: str) -> None:
    """One graph serves all instances of a class: past ``max_captures`` those whose parameters are gone go first."""

    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x).tanh()

    before = set(fxgraph.program.ALIVE)
    compiled = torch.compile(call, backend="graphed", options={"max_captures": 2})
    x = torch.randn(3, 4, device=device)
    kept = [nn.Linear(4, 2).to(device) for _ in range(3)]
    for module in kept:
        compiled(module, x).sum().backward()
    for _ in range(6):
        compiled(nn.Linear(4, 2).to(device), x)
    (program,) = set(fxgraph.program.ALIVE) - before
    replays = program.replays
    for module in kept:
        compiled(module, x)
    assert program.replays == replays + 3
    assert sum(capture.lives() for capture in program.captures.values()) == 3
