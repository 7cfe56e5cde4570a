"""Ops that no rule knows as uncapturable and whose capture fails: they run eagerly, and all around them is captured."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxgraph
from fxgraph.engines import cpu

capturing = False
ran: list[str] = []


def on_host(name: str, x: torch.Tensor) -> torch.Tensor:
    """What an op does that works on the host: CUDA refuses it while a stream is captured, and so does the CPU here."""
    ran.append(name)
    if capturing and not x.is_cuda:
        raise RuntimeError("operation not permitted when stream is capturing")
    return (x.detach().cpu() * 2).to(x.device)


@torch.library.custom_op("fxgraph_tests::untagged", mutates_args=())
def untagged(x: torch.Tensor) -> torch.Tensor:
    return on_host("untagged", x)


@torch.library.custom_op("fxgraph_tests::untagged_backward", mutates_args=())
def untagged_backward(x: torch.Tensor) -> torch.Tensor:
    return on_host("untagged_backward", x)


@torch.library.custom_op("fxgraph_tests::host_backward", mutates_args=())
def host_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fxgraph_tests::broken", mutates_args=())
def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("broken in eager too")


for op in (untagged, untagged_backward, host_backward, broken):
    op.register_fake(torch.empty_like)
untagged.register_autograd(lambda ctx, grad: grad * 2)
broken.register_autograd(lambda ctx, grad: grad)
host_backward.register_autograd(lambda ctx, grad: untagged_backward(grad))


@pytest.fixture(autouse=True)
def _refused_by_the_cpu_engine_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def while_capturing(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            global capturing
            capturing = True
            try:
                return original(*args)
            finally:
                capturing = False

        return run

    monkeypatch.setattr(cpu._Recorder, "run", while_capturing(cpu._Recorder.run))
    monkeypatch.setattr(cpu, "_record_compiled", while_capturing(cpu._record_compiled))
    ran.clear()
    yield


class Net(nn.Module):
    """BatchNorm before, dropout behind; ``between`` is called as often as there are blocks."""

    def __init__(self, *between: Any) -> None:
        super().__init__()
        self.between = between
        self.before = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8))
        self.after = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25)) for _ in between)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for between, after in zip(self.between, self.after, strict=True):
            x = after(between(x))
        return x


def call_untagged(x: torch.Tensor) -> torch.Tensor:
    return untagged(x)


def call_host_backward(x: torch.Tensor) -> torch.Tensor:
    return host_backward(x)


def call_broken(x: torch.Tensor) -> torch.Tensor:
    return broken(x)


def train(run: Any, module: nn.Module, device: str, rows: int = 6, how: Any = torch.optim.AdamW) -> list[Any]:
    torch.manual_seed(5)
    optimizer = how(module.parameters(), 0.01)
    seen: list[Any] = []
    for _ in range(3):
        x = torch.randn(rows, 8, device=device, requires_grad=True)
        optimizer.zero_grad()
        loss = run(x).square().sum()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), x.grad, torch.rand(1, device=device)]
    return [*seen, *[p.detach().clone() for p in module.parameters()], *[b.clone() for b in module.buffers()]]


@contextlib.contextmanager
def one_warning(match: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxgraph.EagerFallbackWarning)
        yield
    said = [str(w.message) for w in caught if issubclass(w.category, fxgraph.EagerFallbackWarning)]
    assert len(said) == 1, said
    assert match in said[0], said


@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize(
    ("between", "captures"),
    [
        ([call_untagged], 2),
        ([call_untagged] * 3, 4),
        ([call_host_backward], 2),
        ([call_untagged, call_host_backward], 3),
    ],
    ids=["once", "three times", "in the backward", "two kinds"],
)
def test_what_is_around_it_is_captured(entry: str, between: list[Any], captures: int, device: str) -> None:
    net = Net(*between).to(device)
    twin = copy.deepcopy(net)
    expected = train(twin, twin, device)
    state = copy.deepcopy(net.state_dict())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        if entry == "torch.compile":
            torch._dynamo.reset()
            found = train(torch.compile(net, backend="graphed"), net, device)
        else:
            sample = torch.randn(6, 8, device=device, requires_grad=True)
            torch.set_rng_state(before)
            graphed = fxgraph.make_graphed_callables(net, (sample,))
            # No trace of what failed.
            assert torch.equal(torch.get_rng_state(), before)
            torch.testing.assert_close(dict(net.state_dict()), dict(state), rtol=0, atol=0)
            found = train(graphed, net, device)
            stats = fxgraph.stats(graphed)
            assert (len(stats.captures), stats.replays) == (captures, 3 * captures), stats
            assert all("[capture-failed]" in reason for reason in stats.eager_reasons)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("at", ["graphing", "another shape"])
@pytest.mark.parametrize("between", [call_untagged, call_host_backward])
def test_what_is_around_it_is_captured_on_inductors_kernels(between: Any, at: str, device: str) -> None:
    net = Net(between).to(device)
    net.between = (torch.sin,) if at == "another shape" else net.between
    twin = copy.deepcopy(net)
    sample = torch.randn(6, 8, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        warnings.simplefilter("ignore", fxgraph.KernelFallbackWarning)
        graphed = fxgraph.make_graphed_callables(net, (sample,), options={"kernels": "inductor"})
        net.between = twin.between = (between,)  # noticed, and captured at the next call
        rows = 6 if at == "graphing" else 4
        how = torch.optim.SGD  # AdamW makes a step of 0.01 out of a gradient that is nothing but rounding
        torch.testing.assert_close(train(graphed, net, device, rows, how), train(twin, twin, device, rows, how))
    captures = [c for program in net.forward.programs() for c in program.captures.values()]
    assert captures and all(capture.plan.joint.for_inductor for capture in captures)
    assert all("[capture-failed]" in reason for reason in fxgraph.stats(graphed).eager_reasons)
    assert fxgraph.stats(graphed).eager_reasons


def test_a_failed_capture_of_inductors_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(cpu, "_record_compiled", fail)
    x = torch.randn(6, 8)
    net = Net(torch.sin).eval()
    with pytest.warns(fxgraph.KernelFallbackWarning, match="their capture failed: RuntimeError: not while capturing"):
        graphed = fxgraph.make_graphed_callables(net, (x,), options={"kernels": "inductor"})
    torch.testing.assert_close(graphed(x), net.forward.original(x), rtol=0, atol=0)
    assert (fxgraph.stats(graphed).replays, fxgraph.stats(graphed).eager_calls) == (1, 0)


def test_one_warning_names_the_op_and_its_line(device: str) -> None:
    with one_warning("[capture-failed] fxgraph_tests.untagged.default cannot be captured"):
        graphed = fxgraph.make_graphed_callables(Net(call_untagged).to(device), (torch.randn(6, 8, device=device),))
    (reason,) = fxgraph.stats(graphed).eager_reasons
    assert "operation not permitted when stream is capturing" in reason or device == "cuda"
    assert "test_failed_captures.py:" in reason


def test_all_calls_of_the_op_are_found_at_the_first_failure(device: str) -> None:
    with one_warning("untagged"):
        fxgraph.make_graphed_callables(
            Net(*[call_untagged] * 3).to(device), (torch.randn(6, 8, device=device),), num_warmup_iters=0
        )
    warmup = 3 if device == "cuda" else 0
    assert len(ran) == warmup + 1 + 3 + 3  # the attempt that fails, the proof that eager can, samples of later parts


def test_other_choices(device: str) -> None:
    net, x = Net(call_untagged).to(device), torch.randn(6, 8, device=device)
    with pytest.raises(fxgraph.CaptureError, match="capture-failed") as caught:
        fxgraph.make_graphed_callables(net, (x,), options={"on_uncapturable": "error"})
    assert isinstance(caught.value.__cause__, RuntimeError)
    with one_warning("runs eagerly: [capture-failed]"):
        graphed = fxgraph.make_graphed_callables(net, (x,), options={"on_uncapturable": "eager"})
    graphed(x)
    stats = fxgraph.stats(graphed)
    assert (len(stats.captures), stats.eager_calls) == (0, 1)


def test_a_small_callable_runs_eagerly_as_a_whole(device: str) -> None:
    x = torch.randn(6, device=device)
    with one_warning("runs eagerly: [capture-failed]"):
        graphed = fxgraph.make_graphed_callables(call_untagged, (x,))
    torch.testing.assert_close(graphed(x), 2 * x)
    assert fxgraph.stats(graphed).eager_calls == 1


def test_what_fails_in_eager_too_is_an_error(device: str) -> None:
    with pytest.raises(fxgraph.TraceError, match="op-failed"):
        fxgraph.make_graphed_callables(Net(call_broken).to(device), (torch.randn(6, 8, device=device),))


def test_a_failure_of_the_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no more graphs")

    monkeypatch.setattr(cpu, "share_memory", fail)
    with pytest.raises(fxgraph.CaptureError, match="no more graphs"):
        fxgraph.make_graphed_callables(Net(nn.Identity()), (torch.randn(6, 8),))


def test_running_out_of_memory_is_no_fault_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    original = cpu._Recorder.call_function

    def call(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.tanh.default:
            raise torch.OutOfMemoryError("full")
        return original(self, target, args, kwargs)

    monkeypatch.setattr(cpu._Recorder, "call_function", call)
    with pytest.raises(fxgraph.CaptureError, match="full"):
        fxgraph.make_graphed_callables(Net(nn.Identity()), (torch.randn(6, 8),))


def test_tries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        attempts.append(target)
        raise RuntimeError("nothing can be captured")

    attempts: list[Any] = []
    monkeypatch.setattr(cpu._Recorder, "call_function", call)
    net = nn.Sequential(*[nn.Tanh() for _ in range(60)])
    x = torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        graphed = fxgraph.make_graphed_callables(net, (x,))
        torch.testing.assert_close(graphed(x), net.forward.original(x), rtol=0, atol=0)
        made = len(attempts)
        assert made <= 9
        graphed(x)
    assert len(attempts) == made  # what has failed is not tried at every call
    assert not fxgraph.stats(graphed).captures


def test_nothing_is_kept_of_the_failed_attempt(device: str) -> None:
    net, x = Net(call_untagged).to(device), torch.randn(6, 8, device=device)
    plain = fxgraph.make_graphed_callables(Net(nn.Identity()).to(device), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
        graphed = fxgraph.make_graphed_callables(net, (x,))
    gc.collect()
    (program, *parts) = graphed.forward.programs()
    assert not program.captures
    assert len(parts) == 2
    assert fxgraph.stats(graphed).pool_bytes <= 2 * fxgraph.stats(plain).pool_bytes
    gone = weakref.ref(program)
    del program, parts
    fxgraph.ungraph(net)
    del graphed
    gc.collect()
    assert gone() is None
