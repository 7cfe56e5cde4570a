"""Graphed callables inside of other tools: an outer torch.compile, export, tracers, transforms, dispatch modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from twins import assert_same, rng_state, set_rng_state

import fxgraph

# Dynamo looks at it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))).tanh()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x).relu()))


def pair(inner: nn.Module, device: str) -> tuple[Outer, Outer]:
    """Eager, and the same with the inner module graphed."""
    eager = Outer(inner).to(device)
    graphed = copy.deepcopy(eager)
    sample = torch.randn(3, 4, device=device, requires_grad=True)
    fxgraph.make_graphed_callables(graphed.inner, (sample,))
    return eager, graphed


# -- torch.compile around ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "graphed"])
@pytest.mark.parametrize("what", ["the outer module", "a function", "the graphed module"])
def test_an_outer_compile_goes_around_the_replays(what: str, backend: str, device: str) -> None:
    eager, graphed = pair(Inner(), device)
    compiled: Any = torch.compile(graphed, backend=backend)
    if what == "a function":
        compiled = torch.compile(lambda x: graphed(x), backend=backend)
    elif what == "the graphed module":
        eager, graphed = eager.inner, graphed.inner
        compiled = torch.compile(graphed, backend=backend)
    for step in range(4):
        results, states = [], rng_state(device)
        for module, call in ((eager, eager), (graphed, compiled)):
            set_rng_state(states)
            x = torch.full((3, 4), float(step), device=device, requires_grad=True)
            out = call(x * torch.arange(12.0, device=device).view(3, 4))
            out.square().sum().backward()
            results.append((out, x.grad, [p.grad for p in module.parameters()], list(module.buffers())))
        assert_same(results[1], results[0], f"step {step}", exact=False)
    stats = fxgraph.stats(graphed if what == "the graphed module" else graphed.inner)
    assert (stats.replays, stats.eager_calls) == (4, 0)


def test_a_full_graph_around_a_graphed_callable_is_refused_with_a_hint(device: str) -> None:
    _, graphed = pair(Inner(), device)
    x = torch.randn(3, 4, device=device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fxgraph\.ungraph"):
        torch.compile(graphed, backend="eager", fullgraph=True)(x)
    fxgraph.ungraph(graphed.inner)
    torch.compile(graphed, backend="eager", fullgraph=True)(x)


def test_a_graphed_callable_inside_of_another_one_is_a_part_of_it(device: str) -> None:
    eager, graphed = pair(nn.Linear(4, 4), device)
    x = torch.randn(3, 4, device=device)
    fxgraph.make_graphed_callables(graphed, (x,))
    assert_same(graphed(x), eager(x))
    assert (fxgraph.stats(graphed).replays, fxgraph.stats(graphed.inner).replays) == (1, 0)


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
def test_a_callable_in_parts_inside_of_a_compile(device: str) -> None:
    class Parts(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x).tanh()
            print("", end="")  # noqa: T201  # ends Dynamo's graph
            return self.norm(x).tanh()

    eager, graphed = pair(Parts(), device)
    compiled = torch.compile(graphed, backend="eager")
    x = torch.randn(3, 4, device=device)
    for _ in range(3):
        assert_same(compiled(x), eager(x))
    assert sum(program.replays for program in fxgraph.program.ALIVE if program.name == "a part of Parts") >= 3


# -- what has to see the ops -------------------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return op(*args, **(kwargs or {}))


def dispatch_mode(module: nn.Module, x: torch.Tensor) -> Any:
    with CountOps() as mode:
        return module(x), mode.ops


def forward_mode(module: nn.Module, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))))


def forward_mode_of_a_parameter(module: nn.Module, x: torch.Tensor) -> Any:
    names = dict(module.named_parameters())
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p.detach(), torch.ones_like(p)) for name, p in names.items()}
        return tuple(forward_ad.unpack_dual(func.functional_call(module, duals, (x,))))


def per_sample_gradients(module: nn.Module, x: torch.Tensor) -> Any:
    def loss(parameters: Any, one: torch.Tensor) -> torch.Tensor:
        return func.functional_call(module, parameters, (one,)).sum()

    return func.vmap(func.grad(loss), in_dims=(None, 0))(dict(module.named_parameters()), x)


def fake_argument(module: nn.Module, x: torch.Tensor) -> Any:
    out = module(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x))
    return type(out), out.shape


def fake_mode(module: nn.Module, x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = module(mode.from_tensor(x))
    return type(out), out.shape


def made_fx(module: nn.Module, x: torch.Tensor) -> Any:
    traced = make_fx(lambda x: module(x))(x)
    return traced(x + 1), [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]


def exported(module: nn.Module, x: torch.Tensor, strict: bool) -> Any:
    program = torch.export.export(module, (x,), strict=strict)
    return program.module()(x + 1), [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


USES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda m, x: func.vmap(m)(x),
    "grad": lambda m, x: func.grad(lambda x: m(x).sum())(x),
    "vjp": lambda m, x: func.vjp(m, x)[1](torch.ones(3, 2, device=x.device)),
    "jvp": lambda m, x: func.jvp(m, (x,), (torch.ones_like(x),)),
    "jacrev": lambda m, x: func.jacrev(m)(x),
    "jacfwd": lambda m, x: func.jacfwd(m)(x),
    "hessian": lambda m, x: func.hessian(lambda x: m(x).sum())(x),
    "functionalize": lambda m, x: func.functionalize(m)(x),
    "per-sample gradients": per_sample_gradients,
    "dual tensors": forward_mode,
    "dual parameters": forward_mode_of_a_parameter,
    "jacobian, vectorised": lambda m, x: torch.autograd.functional.jacobian(m, x, vectorize=True),
    "a dispatch mode": dispatch_mode,
    "fake tensors": fake_argument,
    "a fake mode": fake_mode,
    "make_fx": made_fx,
    "torch.export": lambda m, x: exported(m, x, strict=False),
    "torch.export, strict": lambda m, x: exported(m, x, strict=True),
    "symbolic_trace": lambda m, x: torch.fx.symbolic_trace(m)(x + 1),
    "torch.jit.trace": lambda m, x: torch.jit.trace(m, (x,))(x + 1),
}


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", USES)
def test_what_has_to_see_the_ops_sees_eagers(name: str, whole: bool, device: str) -> None:
    eager, graphed = pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), device)
    if whole:
        fxgraph.ungraph(graphed.inner)
        fxgraph.make_graphed_callables(graphed, (torch.randn(3, 4, device=device),))
    x = torch.randn(3, 4, device=device)
    for _ in range(2):
        assert_same(USES[name](graphed, x), USES[name](eager, x), exact=False)
    before = fxgraph.stats(graphed if whole else graphed.inner).replays
    assert_same(graphed(x), eager(x))
    assert fxgraph.stats(graphed if whole else graphed.inner).replays == before + 1
