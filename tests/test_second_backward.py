"""Backwards one after the other, without ``retain_graph``, through one call with several outputs: as in eager."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxgraph

SECOND_TIME = "Trying to backward through the graph a second time"


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "nothing in common":
            return self.a(x).tanh(), self.b(x).tanh()
        if self.kind == "a shared parameter":
            return F.linear(x, self.a.weight).exp(), F.linear(x, self.a.weight).cos()
        if self.kind == "a trunk":
            hidden = self.trunk(x).tanh()
            return self.a(hidden).tanh(), self.b(hidden).tanh()
        if self.kind == "a trunk that saves nothing":
            hidden = x + self.trunk.bias
            return self.a(hidden).exp(), self.b(hidden).sin(), hidden - 1
        if self.kind == "three":
            return self.a(x).exp(), self.b(x).sin(), self.c(x).relu()
        if self.kind == "numbers":
            return x * 2, x + 1, x * self.a.weight
        if self.kind == "views":
            hidden = self.a(x).exp()
            return hidden[0], hidden[1], self.b(x).t()
        if self.kind == "in place":
            copied = self.b(x).clone()
            copied[0] = 0
            return self.a(x).exp_(), copied
        if self.kind == "dropout":
            return F.dropout(self.a(x), 0.5), F.dropout(self.b(x), 0.5)
        raise AssertionError(self.kind)


KINDS = [
    "nothing in common",
    "a shared parameter",
    "a trunk",
    "a trunk that saves nothing",
    "three",
    "numbers",
    "views",
    "in place",
    "dropout",
]
ALL: tuple[str, ...] = ()
"""In place of names of inputs: a backward into all leaves."""
Backward = tuple[tuple[int, ...], tuple[str, ...], bool]
"""Of the sum of which outputs, for which inputs, with ``retain_graph`` or not."""

SEQUENCES: list[list[Backward]] = [
    [((0,), ALL, False), ((1,), ALL, False)],
    [((1,), ALL, False), ((0,), ALL, False), ((1,), ALL, False)],
    [((0,), ALL, False), ((0,), ALL, False)],
    [((0,), ALL, False), ((0, 1), ALL, False)],
    [((0,), ALL, True), ((0, 1), ALL, False), ((1,), ALL, False)],
    [((0,), ALL, False), ((1,), ALL, True), ((1,), ALL, False)],
    [((0,), ALL, False), ((1,), ALL, False), ((2,), ALL, False)],
    [((2,), ALL, False), ((0, 1), ALL, False), ((2,), ALL, False)],
    [((0, 1, 2), ALL, False), ((2,), ALL, False)],
    [((0,), ("a.weight",), False), ((1,), ("b.weight",), False), ((0,), ("x",), False)],
    [((0,), ("a.weight",), False), ((1,), ("a.weight",), False), ((1,), ALL, False)],
    [((0,), ALL, False), ((1,), ("b.weight", "b.bias"), False), ((1,), ("x",), False)],
    [((1,), ("x", "b.bias"), False), ((0,), ("x",), False), ((1,), ("b.bias",), False)],
    [((0,), ("b.weight",), False), ((0,), ALL, False), ((1,), ("a.weight",), False)],
]


def run(module: nn.Module, x: torch.Tensor, backwards: Sequence[Backward]) -> tuple[list[Any], list[Any]]:
    """What each backward gives, up to the first error, and what is in ``.grad`` then if there was none."""
    module.zero_grad()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    outs = module(x)
    leaves = {"x": x, **dict(module.named_parameters())}
    found: list[Any] = []
    for which, names, retain in backwards:
        chosen = [outs[k].sum() * (k + 1) for k in which if k < len(outs)]
        if not chosen:
            continue
        loss = torch.stack(chosen).sum()
        try:
            if names:
                given = torch.autograd.grad(loss, [leaves[n] for n in names], retain_graph=retain, allow_unused=True)
                found.append([None if value is None else value.clone() for value in given])
            else:
                loss.backward(retain_graph=retain)
                found.append(None)
        except RuntimeError as error:
            found.append(str(error))
            return found, []
    return found, [leaf.grad for leaf in leaves.values()]


@pytest.mark.parametrize("options", [{}, {"grads": "in_graph"}, {"verify": 3}], ids=["autograd", "in_graph", "verify"])
@pytest.mark.parametrize("kind", KINDS)
def test_backwards_one_after_the_other(kind: str, options: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    eager, x = Heads(kind).to(device), torch.randn(4, 4, device=device)
    sample = x.clone().requires_grad_()
    graphed = fxgraph.make_graphed_callables(
        copy.deepcopy(eager), (sample,), allow_unused_input=True, options={"max_in_flight": 1, **options}
    )
    for backwards in SEQUENCES:
        found, expected = run(graphed, x, backwards), run(eager, x, backwards)
        torch.testing.assert_close(
            _tensors(found), _tensors(expected), rtol=0, atol=0, msg=lambda text, b=backwards: f"{b}: {text}"
        )
        assert _errors(found) == _errors(expected), backwards
    assert fxgraph.stats(graphed).eager_calls == 0  # no slot has been left taken


_backwards = st.tuples(
    # For some inputs only of one output only: asked for some inputs of all outputs, a call is over (see the README).
    st.one_of(
        st.tuples(st.sets(st.integers(0, 2), min_size=1).map(lambda which: tuple(sorted(which))), st.just(ALL)),
        st.tuples(
            st.integers(0, 2).map(lambda k: (k,)),
            st.sets(st.sampled_from(["x", "trunk.weight", "a.weight", "b.weight", "b.bias"]), min_size=1).map(
                lambda names: tuple(sorted(names))
            ),
        ),
    ),
    st.booleans(),
).map(lambda drawn: (*drawn[0], drawn[1]))


@pytest.mark.parametrize("grads_option", ["autograd", "in_graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_backwards_one_after_the_other(kind: str, grads_option: str, device: str) -> None:
    torch.manual_seed(0)
    eager, x = Heads(kind).to(device), torch.randn(4, 4, device=device)
    sample = x.clone().requires_grad_()
    graphed = fxgraph.make_graphed_callables(
        copy.deepcopy(eager), (sample,), allow_unused_input=True, options={"grads": grads_option, "max_in_flight": 1}
    )

    @given(st.lists(_backwards, min_size=2, max_size=4))
    def check(backwards: list[Backward]) -> None:
        found, expected = run(graphed, x, backwards), run(eager, x, backwards)
        torch.testing.assert_close(_tensors(found), _tensors(expected), rtol=0, atol=0)
        assert _errors(found) == _errors(expected)
        assert fxgraph.stats(graphed).eager_calls == 0

    check()


def _tensors(result: tuple[list[Any], list[Any]]) -> list[Any]:
    return [value for value in result[0] if not isinstance(value, str)] + result[1]


def _errors(result: tuple[list[Any], list[Any]]) -> list[str]:
    return [value for value in result[0] if isinstance(value, str)]


def heads(kind: str, device: str, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    eager, x = Heads(kind).to(device), torch.randn(4, 4, device=device)
    return (
        fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), allow_unused_input=True, options=options),
        eager,
        x,
    )


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("grads_option", ["autograd", "in_graph"])
def test_an_optimizer_steps_between_the_backwards_of_two_heads(grads_option: str, device: str) -> None:
    graphed, eager, x = heads("nothing in common", device, grads=grads_option)
    for module in (eager, graphed):
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in (module.a, module.b)]
        for _ in range(3):
            a, b = module(x)
            for out, optimizer in zip((a, b), optimizers, strict=True):
                optimizer.zero_grad()
                out.square().sum().backward()
                optimizer.step()
    torch.testing.assert_close(list(graphed.parameters()), list(eager.parameters()), rtol=0, atol=0)


def test_a_step_on_what_the_other_head_has_saved_is_refused_as_in_eager(device: str) -> None:
    graphed, eager, x = heads("a trunk that saves nothing", device)
    x = x.requires_grad_()
    for module in (eager, graphed):
        a, b, _ = module(x)
        a.sum().backward()
        with torch.no_grad():
            module.b.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()


def test_the_slot_waits_for_the_last_piece_and_no_longer(device: str) -> None:
    graphed, _, x = heads("three", device, max_in_flight=1)
    a, b, c = graphed(x)
    for out in (a, b):
        out.sum().backward()
        with pytest.warns(fxgraph.EagerFallbackWarning, match="max_in_flight") if out is a else _nothing():
            graphed(x)
    c.sum().backward()
    assert fxgraph.stats(graphed).eager_calls == 2
    graphed(x)
    assert fxgraph.stats(graphed).eager_calls == 2


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_a_graph_that_is_dropped_between_two_pieces_frees_its_slot(device: str) -> None:
    graphed, _, x = heads("nothing in common", device, max_in_flight=1)
    for _ in range(3):
        a, b = graphed(x)
        a.sum().backward()
        node = weakref.ref(b.grad_fn)
        del a, b
        gc.collect()
        assert node() is None
    assert fxgraph.stats(graphed).eager_calls == 0


def test_outputs_that_share_all_that_is_saved_keep_no_slot(device: str) -> None:
    class WithLoss(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = super().forward(x)
            return logits.square().mean(), logits * 1.5

    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(WithLoss(4, 2).to(device), (x,), options={"max_in_flight": 1})
    for _ in range(3):
        loss, logits = graphed(x)
        loss.backward()
        with pytest.raises(RuntimeError, match=SECOND_TIME):
            logits.sum().backward()
    assert fxgraph.stats(graphed).eager_calls == 0


@pytest.mark.parametrize("grads_option", ["autograd", "in_graph"])
def test_a_second_derivative_of_what_is_left(grads_option: str, device: str) -> None:
    graphed, eager, x = heads("nothing in common", device, grads=grads_option)
    results = []
    for module in (eager, graphed):
        leaf = x.clone().requires_grad_()
        a, b = module(leaf + 0)
        a.sum().backward()
        (first,) = torch.autograd.grad(b.sum(), leaf, create_graph=True)
        first.square().sum().backward()
        results.append([leaf.grad, *grads(module)])
    torch.testing.assert_close(results[1], results[0])


def test_hooks_see_each_piece(device: str) -> None:
    """Those of parameters to which no gradient comes are called with None, which eager does not do: see the README."""
    graphed, eager, x = heads("nothing in common", device)
    results = []
    for module in (eager, graphed):
        seen: dict[str, list[Any]] = {"a": [], "b": [], "out a": []}

        def hook(name: str, seen: dict[str, list[Any]] = seen) -> Callable[[torch.Tensor | None], None]:
            return lambda grad: seen[name].append(grad.clone()) if grad is not None else None

        for name in "ab":
            getattr(module, name).weight.register_hook(hook(name))
        a, b = module(x)
        a.register_hook(hook("out a"))
        a.sum().backward()
        b.sum().backward()
        results.append(seen)
    assert [len(found) for found in results[1].values()] == [1, 1, 1]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_checkpoint_around_it_frees_the_whole_call(device: str) -> None:
    """Eager runs the forward again for each backward; a replay's values are asked for once."""
    graphed, _, x = heads("nothing in common", device)
    x = x.requires_grad_()
    a, b = checkpoint(graphed, x, use_reentrant=False)
    a.sum().backward()
    with pytest.raises(RuntimeError, match=SECOND_TIME) as raised:
        b.sum().backward()
    assert any("retain_graph=True" in note for note in raised.value.__notes__)


def test_what_leads_to_an_input_is_freed_with_the_first_backward(device: str) -> None:
    """The engine runs all nodes that a node has edges to: refused, in autograd's words."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), y.exp()

    x, y = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    a, b = fxgraph.make_graphed_callables(function, (x, y))(x.sin(), y.sin())
    a.sum().backward()
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        b.sum().backward()


def test_nothing_random_is_drawn_when_it_is_found_out_what_eager_saves(device: str) -> None:
    graphed, eager, x = heads("dropout", device)
    draws = []
    for module in (eager, graphed):
        torch.manual_seed(1)
        a, b = module(x)
        a.sum().backward()
        b.sum().backward()
        draws.append((a.detach(), b.detach(), torch.rand(3, device=device), grads(module)))
    torch.testing.assert_close(draws[1], draws[0], rtol=0, atol=0)


def test_an_error_in_a_backward_leaves_nothing_to_run_on(device: str) -> None:
    """Autograd does not know that the call is over: what it reads must not be another call's."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), x.sin()

    x = torch.randn(3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,), options={"max_in_flight": 1})
    a, b = graphed(x)

    def fail(*_: Any) -> None:
        raise KeyError("a hook of the user's")

    handle = a.grad_fn.register_hook(fail)
    with pytest.raises(KeyError):
        (a + b).sum().backward()
    handle.remove()
    graphed(torch.full_like(x, 9.0))
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        (a + b).sum().backward()


@pytest.mark.parametrize(
    ("function", "allowed"), [(lambda x: x + 1, True), (lambda x: x * 2, False)], ids=["saves nothing", "saves 2"]
)
def test_a_second_backward_of_what_keeps_nothing_of_the_slot(
    function: Callable[[torch.Tensor], torch.Tensor], allowed: bool, device: str
) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    for call in (function, graphed):
        x.grad = None
        out = call(x)
        out.sum().backward()
        if allowed:
            out.sum().backward()
            torch.testing.assert_close(x.grad, torch.full_like(x, 2.0), rtol=0, atol=0)
        else:
            with pytest.raises(RuntimeError, match=SECOND_TIME):
                out.sum().backward()


def test_two_heads_behind_torch_compile_and_with_inductors_kernels(device: str) -> None:
    torch._dynamo.reset()
    eager, x = Heads("nothing in common").to(device), torch.randn(4, 4, device=device)
    compiled = torch.compile(copy.deepcopy(eager), backend="graphed", options={"kernels": "inductor"})
    for module in (eager, compiled):
        a, b = module(x)
        a.sum().backward()
        b.sum().backward()
    torch.testing.assert_close(grads(compiled), grads(eager))
