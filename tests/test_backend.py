"""``torch.compile(model, backend="graphed")``: the same pipeline behind Dynamo's front door."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from twins import assert_same, rng_state, state_of

import fxgraph
from fxgraph import OptionError, Options, backend

ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bn, self.outer = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.nn.functional.dropout(self.bn(self.inner(x)).relu(), 0.25, self.training))


def compiled(target: Any, **options: Any) -> Any:
    return torch.compile(target, backend="graphed", options=options or None)


def replays() -> int:
    gc.collect()  # programs of tests before this one count until they are gone
    return fxgraph.stats().replays


def causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(cause)
    return found


# -- equality ---------------------------------------------------------------------------------------------------------


def train(module: nn.Module, call: Any, device: str, steps: int, rows: int = 5) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(rows, 3, device=device, requires_grad=True)
        loss = call(x).square().sum()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), x.grad]
    return [*seen, *rng_state(device)]


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_a_training_run_is_eagers(dynamic: bool | None, device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    call = torch.compile(module, backend="graphed", dynamic=dynamic)
    before = replays()
    for rows in (5, 5, 2):
        assert_same(train(module, call, device, 3, rows), train(twin, twin, device, 3, rows))
        assert_same(state_of(module), state_of(twin))
    assert replays() - before == 9


def test_evaluation_and_no_grad(device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    call = compiled(module)
    for training in (True, False, True):
        module.train(training)
        twin.train(training)
        x = torch.randn(4, 3, device=device)
        torch.manual_seed(1)
        with torch.no_grad():
            found = call(x)
        torch.manual_seed(1)
        with torch.no_grad():
            expected = twin(x)
        assert_same(found, expected)
        assert_same(state_of(module), state_of(twin))


def test_outputs_of_every_kind(device: str) -> None:
    def f(x: torch.Tensor, y: dict[str, torch.Tensor], n: int) -> Any:
        base = x * y["y"]
        return {"views": (base, base.t(), x.view(-1)), "whole": (base > 0), "number": n + 1, "input": x, "none": None}

    x, y = torch.randn(2, 3, device=device, requires_grad=True), torch.randn(2, 3, device=device)
    call = compiled(f)
    for n in (1, 1, 2):
        found, expected = call(x, {"y": y}, n), f(x, {"y": y}, n)
        assert_same(found, expected)
        assert found["input"] is x
        assert found["views"][1]._base is not None
    assert_same(*[torch.autograd.grad(g(x, {"y": y}, 1)["views"][1].exp().sum(), x) for g in (call, f)])


def test_closed_over_tensors(device: str) -> None:
    weight = torch.randn(3, device=device, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    call = compiled(f)
    for _ in range(2):
        x = torch.randn(3, device=device)
        call(x).sum().backward()
        assert_same(weight.grad, x)
        weight.grad = None
        with torch.no_grad():
            weight.mul_(2)


def test_mutated_arguments(device: str) -> None:
    def f(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[1:] = cache[:-1].clone()
        cache[0] = x
        return cache.sum(0)

    call = compiled(f)
    caches = [torch.zeros(3, 2, device=device) for _ in range(2)]
    for _ in range(4):
        x = torch.randn(2, device=device)
        assert_same(call(caches[0], x), f(caches[1], x))
        assert_same(*caches)


# Dynamo itself reads .grad of the non-leaf tensor between the two graphs, with any backend.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_graph_break_gives_two_graphs_that_both_replay(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch._dynamo.graph_break()
        return y * 2

    call = compiled(f)
    before = replays()
    x = torch.randn(3, device=device, requires_grad=True)
    assert_same(call(x).detach(), f(x).detach())
    assert replays() - before == 2
    assert_same(*[torch.autograd.grad(g(x).sum(), x) for g in (call, f)])


def test_what_no_graph_can_hold_runs_eagerly_with_one_warning(device: str) -> None:

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x).sum() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(f)
        x = torch.tensor([0.0, 1.0, 2.0], device=device)
        with pytest.warns(fxgraph.EagerFallbackWarning, match="runs eagerly"):
            assert_same(call(x), f(x))
        assert_same(call(x * 0), f(x * 0))  # another count of elements, no further warning


def test_a_compiled_and_a_graphed_module_share_everything_after_the_trace(device: str) -> None:
    module = Net().to(device)
    twin = copy.deepcopy(module)
    call = compiled(nn.Sequential(module, nn.Tanh()))
    x = torch.randn(4, 3, device=device)
    torch.manual_seed(2)
    found = call(x)
    torch.manual_seed(2)
    assert_same(found.detach(), twin(x).tanh().detach())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_calling_a_graphed_module_from_compiled_code(device: str) -> None:
    inner = nn.Linear(3, 3).to(device)
    twin = copy.deepcopy(inner)
    fxgraph.make_graphed_callables(inner, (torch.randn(4, 3, device=device),))

    def f(x: torch.Tensor) -> torch.Tensor:
        return inner(x).relu()

    call = torch.compile(f, backend="graphed")  # the graph ends at the inner module
    for _ in range(2):
        x = torch.randn(4, 3, device=device)
        assert_same(call(x).detach(), twin(x).relu().detach())
    assert fxgraph.stats(inner).replays == 2


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_reach_the_capture(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    call = torch.compile(f, backend="graphed", options={"max_captures": 1, "num_warmup_iters": 0}, dynamic=True)
    for rows in (2, 3, 2, 4):
        x = torch.randn(rows, 3, device=device)
        assert_same(call(x), f(x))
    alive = [p for p in fxgraph.program.ALIVE if isinstance(p, fxgraph.program.Program)]
    programs = [p for p in alive if p.options == Options(max_captures=1, num_warmup_iters=0)]
    assert programs and all(len(program.captures) <= 1 for program in programs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_capture": 2}, ["unknown-option", "'max_capture'", "max_captures", "max_in_flight", "engine"]),
        ({"engine": "rocm"}, ["bad-option", "'rocm'", "'auto', 'cuda', 'cpu'"]),
        ({"triton.cudagraphs": True, "mode": 1}, ["unknown-option", "'triton.cudagraphs', 'mode'"]),
    ],
)
def test_a_bad_option_is_refused_by_name_and_the_allowed_are_listed(options: dict[str, Any], words: list[str]) -> None:
    call = torch.compile(lambda x: x * 2, backend="graphed", options=options)
    with pytest.raises(Exception) as caught:
        call(torch.ones(2))
    (error,) = [e for e in causes(caught.value) if isinstance(e, OptionError)][:1]
    for word in words:
        assert word in str(error)


def test_a_mode_is_refused() -> None:
    call = torch.compile(lambda x: x * 2, backend="graphed", mode="reduce-overhead")
    with pytest.raises(Exception) as caught:
        call(torch.ones(2))
    (error,) = [e for e in causes(caught.value) if isinstance(e, OptionError)][:1]
    assert (error.id, error.observed) == ("bad-option", "'reduce-overhead'")
    assert "max_captures" in error.hint


@pytest.mark.parametrize("value", ["eager", "error"])
def test_what_torch_compile_itself_decides_is_refused(value: str) -> None:
    call = torch.compile(lambda x: x * 2, backend="graphed", options={"on_new_signature": value})
    with pytest.raises(Exception) as caught:
        call(torch.ones(2))
    (error,) = [e for e in causes(caught.value) if isinstance(e, OptionError)][:1]
    assert (error.id, error.observed) == ("bad-option", repr(value))
    assert torch.compile(lambda x: x * 2, backend="graphed", options={"on_new_signature": "capture"})(
        torch.ones(2)
    ).tolist() == [2.0, 2.0]


# -- registration -----------------------------------------------------------------------------------------------------


def test_the_backend_is_listed() -> None:
    assert "graphed" in torch._dynamo.list_backends(exclude_tags=())
    assert torch._dynamo.lookup_backend("graphed") is backend.graphed


def test_importing_is_enough_where_the_package_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import torch, fxgraph\n"
        "f = torch.compile(lambda x: x * 2, backend='graphed')\n"
        "assert f(torch.ones(2)).tolist() == [2.0, 2.0]\n"
        "assert fxgraph.stats().replays == 1, fxgraph.stats()\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_exceptions_of_the_users_own_come_through(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.shape[0] == 3:
            raise KeyError("own")
        return y

    call = compiled(f)
    with pytest.raises(KeyError, match="own"):
        call(torch.ones(3, device=device))
    assert_same(call(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))


def test_dynamos_reset_lets_captures_go(device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(5, device=device)
    programs = set(fxgraph.program.ALIVE)
    call = compiled(f)
    assert_same(call(x), x * 2)
    assert set(fxgraph.program.ALIVE) - programs
    torch._dynamo.reset()
    del call
    gc.collect()
    assert not set(fxgraph.program.ALIVE) - programs


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_a_hook_registered_later_on_an_inner_module_runs(device: str) -> None:
    """Dynamo by default does not look; the backend asks it to, and leaves its settings as they were."""
    settings = torch._dynamo.config
    before = {name: value for name, value in settings.get_config_copy().items() if "guards" in name}
    model, seen = Hooked().to(device), []
    compiled = torch.compile(model, backend="graphed")
    x = torch.randn(2, 3, device=device)
    compiled(x)
    assert {name: value for name, value in settings.get_config_copy().items() if "guards" in name} == before
    handle = model.inner.register_forward_hook(lambda module, args, out: seen.append(1))
    compiled(x)
    handle.remove()
    compiled(x)
    assert seen == [1]
    model.inner.weight.requires_grad_(False)
    compiled(x).sum().backward()
    assert model.inner.weight.grad is None


def test_many_instances_of_one_class_are_captured_once_each(device: str) -> None:
    blocks = [torch.compile(nn.Linear(4, 4).to(device), backend="graphed") for _ in range(12)]
    counts = []
    for _ in range(3):
        hidden = torch.randn(2, 4, device=device, requires_grad=True)
        for block in blocks:
            hidden = block(hidden)
        hidden.sum().backward()
        counts.append(sum(len(program.captures) for program in fxgraph.program.ALIVE))
    assert counts[0] == counts[-1] >= 12


def test_captures_of_parameters_that_are_gone_go_first(device: str) -> None:
    module = nn.Linear(4, 4).to(device)
    graphed = fxgraph.make_graphed_callables(module, (torch.randn(2, 4, device=device),), options={"max_captures": 2})
    for _ in range(5):
        module.weight.data = module.weight.data.clone()
        graphed(torch.randn(2, 4, device=device))
        assert len(fxgraph.stats(graphed).captures) <= 2
