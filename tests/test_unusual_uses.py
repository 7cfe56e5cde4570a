"""Uses that are legitimate but rare: each was wrong, or said something wrong, at some time."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fxgraph
from fxgraph import ContractError, EagerFallbackWarning, TraceError, make_graphed_callables


@torch.library.custom_op("fxgraph_unusual::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, norm: bool, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.reentrant = nn.Linear(4, 4), nn.Dropout(dropout), reentrant
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.linear(x))).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant).sin()


def both_entries(module: nn.Module, x: torch.Tensor) -> list[Callable[..., Any]]:
    """The module graphed in both ways, each on its own copy."""
    return [
        make_graphed_callables(copy.deepcopy(module), (x,)),
        torch.compile(copy.deepcopy(module), backend="graphed"),
    ]


# Eager runs the part twice and counts BatchNorm's statistics twice; with statistics the graph therefore runs eagerly.
@pytest.mark.filterwarnings("ignore:.*eager runs twice:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_the_callable(dropout: float, norm: bool, reentrant: bool, device: str) -> None:
    """Outputs, gradients and statistics are eager's, whether the random part is run again or not."""
    eager = Checkpointed(dropout, norm, reentrant).to(device)
    x = torch.randn(6, 4, device=device)
    for graphed in both_entries(eager, x):
        reference = copy.deepcopy(eager)
        results = []
        for module in (reference, graphed):
            torch.manual_seed(1)
            given = x.clone().requires_grad_()
            outputs = [module(given) for _ in range(2)]
            sum(outputs).sum().backward()
            results.append([*outputs, given.grad, *[p.grad for p in module.parameters()], *module.buffers()])
        for got, want in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_in_a_graph_that_runs_eagerly(dropout: float, device: str) -> None:
    """Past ``max_in_flight`` the graph runs by itself; its checkpoint draws the same mask again."""
    eager = Checkpointed(dropout, norm=False, reentrant=False).to(device)
    x = torch.randn(6, 4, device=device)
    graphed = make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": 1})
    gradients = []
    for module in (eager, graphed):
        torch.manual_seed(2)
        losses = [module(x).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    for got, want in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_an_embedding_that_renormalises_its_weight(device: str) -> None:
    """``max_norm`` writes the parameter in place behind autograd's back."""
    eager = nn.Embedding(10, 4, max_norm=0.5).to(device)
    graphed = make_graphed_callables(copy.deepcopy(eager), (torch.randint(10, (3,), device=device),))
    for _ in range(3):
        index = torch.randint(10, (3,), device=device)
        want, got = eager(index), graphed(index)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(graphed.weight, eager.weight, rtol=0, atol=0)
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(graphed.weight.grad, eager.weight.grad, rtol=0, atol=0)


def test_a_custom_op_without_a_fake_implementation(device: str) -> None:
    """It is named as that, not as an op that fails."""
    x = torch.randn(2, device=device)
    with pytest.raises(TraceError) as caught:
        make_graphed_callables(lambda x: without_fake(x) + 1, (x,))
    assert caught.value.id == "no-fake-impl"
    assert "without_fake" in caught.value.observed
    assert fxgraph.check(lambda x: without_fake(x) + 1, (x,)).ids == ("no-fake-impl",)


def generator(x: torch.Tensor) -> Any:
    yield x


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("target", "observed"),
    [(generator, "a generator function"), (coroutine, "a coroutine function"), (nn.Linear, "the class Linear")],
)
def test_what_a_call_does_not_run(target: Any, observed: str, device: str) -> None:
    """Calling these gives an object, not a result."""
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(target, (torch.ones(2, device=device),))
    assert (caught.value.id, caught.value.observed) == ("not-callable", observed)


def test_an_argument_that_the_contract_refuses_does_not_change_the_callable(device: str) -> None:
    """The call runs eagerly, with eager's own error; the captures stay, and later errors are as clear as before."""
    graphed = make_graphed_callables(nn.Linear(4, 4).to(device), (torch.randn(2, 4, device=device),))
    with pytest.warns(EagerFallbackWarning, match="unsupported-argument"), pytest.raises(TypeError):
        graphed(object())
    with pytest.raises(TraceError, match="op-failed"):
        graphed(torch.ones(2, 5, device=device))
    before = fxgraph.stats(graphed).replays
    graphed(torch.ones(2, 4, device=device))
    assert fxgraph.stats(graphed).replays == before + 1


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_another_dtype_than_the_callable_takes(device: str) -> None:
    """Fake tensors do not see it, the first run does; the error is the one of a wrong shape."""
    module = nn.Linear(4, 4).to(device)
    with pytest.raises(TraceError, match="op-failed"):
        make_graphed_callables(module, (torch.ones(2, 4, dtype=torch.long, device=device),))
    graphed = make_graphed_callables(module, (torch.ones(2, 4, device=device),))
    with pytest.raises(TraceError, match="op-failed"):
        graphed(torch.ones(2, 4, dtype=torch.float64, device=device))
    assert graphed(torch.ones(2, 4, device=device)).shape == (2, 4)


def test_the_users_own_exception_at_a_call_has_a_note(device: str) -> None:
    """It comes through as itself and says who ran what."""

    class Net(nn.Module):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise LookupError("my own")
            return x * 2

    graphed = make_graphed_callables(Net(), (torch.ones(2, device=device),))
    graphed.broken = True
    with pytest.raises(LookupError, match="my own") as caught:
        graphed(torch.ones(2, device=device))
    assert any("fxgraph" in note for note in caught.value.__notes__)
    graphed.broken = False
    assert torch.equal(graphed(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))


def test_a_mode_of_torch_compile_is_refused_by_name(device: str) -> None:
    """``mode=`` belongs to Inductor."""
    compiled = torch.compile(lambda x: x + 1, backend="graphed", mode="max-autotune")
    with warnings.catch_warnings(), pytest.raises(Exception, match="has no modes"):
        warnings.simplefilter("ignore")
        compiled(torch.ones(2, device=device))


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_graphing_a_callable_that_cannot_be_traced_does_not_run_it(device: str) -> None:
    """Tracing runs no Python of the user's, in parts neither."""
    seen: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if x.sum() > 1e9:
            return x
        return x * 2

    graphed = make_graphed_callables(f, (torch.ones(2, device=device),))
    assert seen == []
    assert torch.equal(graphed(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))
    assert seen == [1]


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_an_error_that_the_callable_catches_itself(device: str) -> None:
    """Eager works, so graphing does too."""
    layer = nn.Linear(4, 4).to(device)

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            return layer(x) @ torch.ones(3, 3, device=device)
        except RuntimeError:
            return layer(x) * 3

    x = torch.randn(2, 4, device=device)
    graphed = make_graphed_callables(f, (x,))
    torch.testing.assert_close(graphed(x), f(x), rtol=0, atol=0)


# -- modes and transforms ---------------------------------------------------------------------------------------------


def entries(function: Any, *sample: torch.Tensor) -> list[Any]:
    return [fxgraph.make_graphed_callables(function, sample), torch.compile(function, backend="graphed")]


@pytest.mark.filterwarnings("ignore:.*switches grad mode on inside:fxgraph.EagerFallbackWarning")
def test_grad_mode_switched_on_inside_of_no_grad(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x * x).sum()

    x = torch.randn(3, device=device, requires_grad=True)
    for graphed in entries(function, x):
        with torch.no_grad():
            out = graphed(x)
        (grad,) = torch.autograd.grad(out, x)
        assert torch.equal(grad, 2 * x)


def test_a_grad_mode_that_leaks_out(device: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    x = torch.randn(3, device=device, requires_grad=True)
    for graphed in entries(function, x):
        for _ in range(3):
            torch.set_grad_enabled(True)
            try:
                graphed(x)
                assert not torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(True)


@pytest.mark.filterwarnings("ignore:.*forward-mode:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, for make_dual
def test_forward_mode(device: str) -> None:
    x = torch.randn(3, device=device)
    for graphed in entries(lambda x: x * x, x):
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(graphed(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert torch.equal(tangent, 2 * x)
        assert torch.equal(graphed(x), x * x)


@pytest.mark.filterwarnings("ignore:.*forward of its class:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("how", ["method", "class"])
def test_the_class_of_a_module_gets_another_forward(how: str, device: str) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Trebles(Doubles):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    x = torch.randn(3, device=device)
    module = Doubles()
    graphed = fxgraph.make_graphed_callables(module, (x,))
    if how == "method":
        Doubles.forward = Trebles.forward
    else:
        module.__class__ = Trebles
    assert torch.equal(graphed(x), x * 3)


@pytest.mark.filterwarnings("ignore:.*torch.autograd.Function:fxgraph.EagerFallbackWarning")
# Dynamo, reading a Function that is defined in a function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_function_that_wants_none_for_gradients_that_are_none(device: str) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
            return one + (100 if other is None else other)

    x = torch.randn(3, device=device, requires_grad=True)
    for graphed in entries(lambda x: Function.apply(x)[0] * 1, x):
        (grad,) = torch.autograd.grad(graphed(x).sum(), x)
        assert torch.equal(grad, torch.full_like(x, 101))


def test_a_default_device(device: str) -> None:
    module, x = nn.Linear(3, 2).to(device), torch.randn(4, 3, device=device)
    with torch.device(device):
        graphed = fxgraph.make_graphed_callables(module, (x,))
        inside = graphed(x)
    assert torch.equal(graphed(x), inside)
    makes = fxgraph.make_graphed_callables(lambda x: x + torch.ones(3), (torch.randn(4, 3),))
    with torch.device("cpu"):
        assert makes(torch.zeros(4, 3)).sum() == 12


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_functorch_inside(transform: Any, device: str) -> None:
    inner = (lambda t: t.sin().sum()) if transform is torch.func.grad else (lambda t: t.sin() * 2)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(lambda x: transform(inner)(x), (x,))
    for _ in range(2):
        out, expected = graphed(x), transform(inner)(x)
        assert torch.equal(out, expected)
        assert torch.equal(*[torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)])


def test_a_batched_backward(device: str) -> None:
    x, v = torch.randn(3, device=device, requires_grad=True), torch.randn(5, 3, device=device)
    graphed = fxgraph.make_graphed_callables(lambda x: x.sin() * 2, (x,))
    grads = [
        torch.autograd.grad(function(x), x, v, is_grads_batched=True)[0]
        for function in (graphed, lambda x: x.sin() * 2)
    ]
    assert torch.equal(*grads)
    graphed(x).square().sum().backward()


@pytest.mark.filterwarnings("ignore:.*shares memory with another input:fxgraph.EagerFallbackWarning")
def test_samples_that_overlap_where_one_is_changed(device: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    memory = torch.randn(5, device=device)
    graphed = fxgraph.make_graphed_callables(function, (memory[1:], memory[:-1]))
    other = memory.clone()
    for _ in range(2):
        assert torch.equal(graphed(memory[1:], memory[:-1]), function(other[1:], other[:-1]))
        assert torch.equal(memory, other)
    apart, twin = torch.randn(4, device=device), torch.randn(4, device=device)
    assert torch.equal(graphed(apart, twin), twin * 2)
    assert fxgraph.stats(graphed).replays == 1, "a call whose inputs lie apart is captured"


def test_threads_that_compile_at_the_same_time(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    modules = [torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device), backend="graphed") for _ in range(4)]
    errors: list[BaseException] = []

    def run(module: Any) -> None:
        try:
            module(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_graph_module_that_has_not_been_called_yet(device: str) -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(copy.deepcopy(graph))
        return graph

    x = torch.ones(3, device=device)
    torch.compile(lambda x: x.sin() + 1, backend=backend)(x)
    graphed = fxgraph.make_graphed_callables(seen[0], (x,))
    assert torch.equal(graphed(x)[0], x.sin() + 1)


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("entry", ["callables", "in parts", "compile"])
def test_a_failing_op_prints_nothing(
    entry: str, capfd: pytest.CaptureFixture[str]
) -> None:  # on a GPU such an index ends its use
    def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.index_select(x.sin(), 0, index).cos()

    def in_parts(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = pick(x, index)
        print("", end="")  # noqa: T201  # ends Dynamo's graph
        return pick(y, index)

    x, good, bad = torch.randn(3, requires_grad=True), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9])
    if entry == "compile":
        graphed = torch.compile(pick, backend="graphed")
    else:
        graphed = make_graphed_callables(in_parts if entry == "in parts" else pick, (x, good))
    with pytest.raises(IndexError, match="index out of range"):
        graphed(x, bad)
    waiting = [graphed(x, good) for _ in range(3)]  # past max_in_flight
    with pytest.raises(IndexError, match="index out of range"):
        graphed(x, bad)
    assert len(waiting) == 3
    assert capfd.readouterr().err == ""


def test_an_inner_modules_class_gets_another_forward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.randn(3, device=device)
    graphed = make_graphed_callables(nn.Sequential(Doubles(), nn.Tanh()), (x,))
    for _ in range(2):
        assert torch.equal(graphed(x), (x * 2).tanh())
        with monkeypatch.context() as patch:
            patch.setattr(Doubles, "forward", lambda self, x: x * 3)
            patch.setattr(nn.Tanh, "forward", lambda self, x: x.sigmoid())
            for _ in range(2):
                assert torch.equal(graphed(x), (x * 3).sigmoid())


@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
@pytest.mark.parametrize("moved", ["freed", "shared", "shared and kept", "shared with the module"])
def test_the_memory_of_gradients_is_freed_or_moved(moved: str, grads: str, device: str) -> None:
    """As wrappers do that free what they need no more: a later replay must not write where it was."""
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    graphed = copy.deepcopy(eager)
    make_graphed_callables(graphed, (torch.randn(4, 6, device=device),), options={"grads": grads})
    for _ in range(5):
        x = torch.randn(4, 6, device=device)
        for module in (eager, graphed):
            module(x).square().sum().backward()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
            if moved == "freed":
                other.grad.untyped_storage().resize_(0)
            elif moved != "shared with the module":
                other.grad.share_memory_()
            if moved != "shared and kept":
                one.grad = other.grad = None
        if moved == "shared with the module":
            graphed.share_memory()


@pytest.mark.parametrize("moved", ["freed", "shared"])
def test_the_memory_of_outputs_is_freed_or_moved(moved: str, device: str) -> None:
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    graphed = copy.deepcopy(eager)
    make_graphed_callables(graphed, (torch.randn(4, 6, device=device),))
    for _ in range(5):
        x = torch.randn(4, 6, device=device)
        outputs = [module(x) for module in (eager, graphed)]
        assert torch.equal(*outputs)
        outputs[0].sum().backward()
        loss = outputs[1].sum()
        if moved == "freed":
            outputs[1].untyped_storage().resize_(0)
        else:
            outputs[1].detach().share_memory_()
        loss.backward()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x + 1
    return x - 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
def test_torch_jit_script(device: str) -> None:
    x = torch.ones(2, device=device)
    scripted = torch.jit.script(make_graphed_callables(_scripted, (x,)))
    for given in (x, -x):  # the branch is the original's own
        torch.testing.assert_close(scripted(given), _scripted(given), rtol=0, atol=0)
    module = make_graphed_callables(nn.Tanh(), (x,))
    with pytest.raises(AttributeError, match=r"fxgraph\.ungraph\(module\)"):
        torch.jit.script(module)
    assert not hasattr(module.forward, "__globals__")
    torch.testing.assert_close(torch.jit.script(fxgraph.ungraph(module))(x), x.tanh(), rtol=0, atol=0)
