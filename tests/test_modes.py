"""passes/modes.py: each part of a graph runs in the modes in which its ops ran, and leaves none of them on."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

import fxgraph
from passes.facts import ops_of
from passes.modes import SWITCHES, take_out_switches
from passes.split import assign_stages, calls_of_stages, split


def modes() -> tuple[Any, ...]:
    """What is switched in this process, the depth of autocast's nesting included."""
    torch.autocast_increment_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.autocast_decrement_nesting(),
        _cur_sdpa_kernel_backends(),
    )


# -- models -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def autocast(**options: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def chosen(h: torch.Tensor) -> torch.Tensor:
    return h[h > 0.1].mean()


def before_the_break(m: Any, x: torch.Tensor) -> Any:
    with autocast():
        h = m.first(x).relu()
    h = h.float()
    return m.second(h * chosen(h)).tanh()


def around_the_break(m: Any, x: torch.Tensor) -> Any:
    with autocast():
        h = m.first(x).relu()
        h = m.second(h * chosen(h))
    return h.float().tanh()


def an_island(m: Any, x: torch.Tensor) -> Any:
    with autocast():
        h = m.first(x).relu()
        with autocast(enabled=False):
            h = h.float() * chosen(h)
        h = m.second(h)
    return h.float(), h


def a_number(m: Any, x: torch.Tensor) -> Any:
    with autocast():
        h = m.first(x).relu()
        h = m.second(h * h.sum().item())
    return h.float()


def without_grad(m: Any, x: torch.Tensor) -> Any:
    h = m.first(x).relu()
    with torch.no_grad():
        k = chosen(h) * 2
        t = h * k
    return (h + t).tanh() * m.second(x), k


def switched_by_hand(m: Any, x: torch.Tensor) -> Any:
    h = m.first(x).relu()
    torch.set_grad_enabled(False)
    k = chosen(h) * 2
    t = h * k
    torch.set_grad_enabled(True)
    return (h + t).tanh() * m.second(x), k


def in_inference_mode(m: Any, x: torch.Tensor) -> Any:
    h = m.first(x)
    with torch.inference_mode():
        k = chosen(h).item()
    return m.second(h.tanh()) * k


def with_chosen_attention(m: Any, x: torch.Tensor) -> Any:
    h = m.first(x)[None, None]
    with sdpa_kernel(SDPBackend.MATH):
        k = chosen(h)
        h = F.scaled_dot_product_attention(h * k, h, h)
    return m.second(h[0, 0])


def all_at_once(m: Any, x: torch.Tensor) -> Any:
    with autocast(), torch.no_grad():
        k = chosen(m.first(x))
        with torch.enable_grad():
            h = m.second(x) * k
            with autocast(enabled=False):
                h = h.float() + chosen(h)
    return m.first(h), k


MODELS = [
    before_the_break,
    around_the_break,
    an_island,
    a_number,
    without_grad,
    switched_by_hand,
    in_inference_mode,
    with_chosen_attention,
    all_at_once,
]


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("function", MODELS)
def test_models_with_modes_around_a_break_train_as_in_eager(function: Callable[..., Any], entry: str) -> None:
    torch.manual_seed(0)
    eager, x = Model(function), torch.randn(6, 8)
    module: Any = copy.deepcopy(eager)
    before = modes()
    if entry == "torch.compile":
        graphed: Any = torch.compile(module, backend="graphed")
    else:
        graphed = fxgraph.make_graphed_callables(module, (x,), allow_unused_input=True)
    assert modes() == before
    for _ in range(3):
        results = []
        for side, called in ((eager, eager), (module, graphed)):
            out = called(x)
            assert modes() == before
            leaves = out if isinstance(out, tuple) else (out,)
            sum(leaf.float().square().mean() for leaf in leaves if leaf.requires_grad).backward()
            results.append([*leaves, *[p.grad for p in side.parameters()]])
            with torch.no_grad():
                for p in side.parameters():
                    p -= 0.01 * (p.grad if p.grad is not None else 0)
                    p.grad = None
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.requires_grad == other.requires_grad
                # A parameter that several parts use: its gradients come by part, so that their sum may round otherwise.
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


_ASKED_TO_FAIL: list[bool] = []


@torch.library.custom_op("fxgraph_tests::fails_when_asked", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def fails_when_asked(x: torch.Tensor) -> torch.Tensor:
    if _ASKED_TO_FAIL:
        raise LookupError("as asked")
    return x.clone()


fails_when_asked.register_fake(torch.empty_like)


def in_autocast(h: torch.Tensor) -> torch.Tensor:
    with autocast():
        h = h @ h
        with autocast(enabled=False):
            return fails_when_asked(h.float())


def in_no_grad(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return fails_when_asked(h * 2)


def in_inference(h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), autocast():
        h = fails_when_asked(h @ h)
    return h.float().clone()


def in_attention(h: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return fails_when_asked(F.scaled_dot_product_attention(h[None], h[None], h[None]))[0]


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("choice", ["split", "eager"])
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("middle", [in_autocast, in_no_grad, in_inference, in_attention])
def test_an_op_that_raises_leaves_no_mode_on(
    middle: Callable[[torch.Tensor], torch.Tensor], entry: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return middle(x.sin()).cos() * 2

    x, before = torch.randn(4, 4), modes()
    if entry == "torch.compile":
        graphed: Any = torch.compile(function, backend="graphed", options={"on_uncapturable": choice})
    else:
        graphed = fxgraph.make_graphed_callables(function, (x,), options={"on_uncapturable": choice})
    expected = function(x)
    for asked in (False, True, True, False):
        monkeypatch.setattr(sys.modules[__name__], "_ASKED_TO_FAIL", [asked] * asked)
        if asked:
            with pytest.raises(LookupError, match="as asked"):
                graphed(x)
        else:
            torch.testing.assert_close(graphed(x), expected, rtol=0, atol=0)
        assert modes() == before


def test_captured_parts_are_as_few_as_without_modes() -> None:
    def plain(x: torch.Tensor) -> Any:
        return x.sin().cos() + chosen(x).exp(), x.tan().exp()

    def switched(x: torch.Tensor) -> Any:
        with torch.no_grad():
            k = chosen(x)
        return x.sin().cos() + k.exp(), x.tan().exp()

    counts = []
    for function in (plain, switched):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxgraph.EagerFallbackWarning)
            graphed = fxgraph.make_graphed_callables(function, (torch.randn(4, requires_grad=True),))
        counts.append(len(fxgraph.stats(graphed).captures))
    assert counts[0] == counts[1]


# -- any program ------------------------------------------------------------------------------------------------------

CONTEXTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bfloat16": (torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None)),
    "no autocast": (torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, False, None)),
    "no_grad": (torch._C._set_grad_enabled, (False,)),
    "enable_grad": (torch._C._set_grad_enabled, (True,)),
}
Block = Any
"""A name of an op with its operands, counted backwards among the values so far, and whether it is a break; or the name
of a context with the blocks inside of it."""
_op = st.tuples(st.sampled_from(["mm", "sin", "add", "detach"]), st.integers(0, 5), st.integers(0, 5), st.booleans())
blocks = st.recursive(
    st.lists(_op, min_size=1, max_size=3),
    lambda inner: st.lists(st.one_of(_op, st.tuples(st.sampled_from(sorted(CONTEXTS)), inner)), min_size=1, max_size=4),
    max_leaves=8,
)


def build(program: Block) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph as Dynamo leaves one, with the nodes that are breaks."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    breaks: list[fx.Node] = []

    def add(items: Block, grad: bool) -> None:
        for item in items:
            if len(item) == 2:
                enter, args = CONTEXTS[item[0]]
                entered = graph.call_function(enter, args)
                if enter is torch._C._set_grad_enabled:
                    add(item[1], args[0])
                    graph.call_function(enter, (grad,))
                else:
                    add(item[1], grad)
                    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
                continue
            name, first, second, is_break = item
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if name == "mm":  # of operands of one dtype; which it computes in is the mode's to say
                a, b = graph.call_method("float", (a,)), graph.call_method("float", (b,))
                node = graph.call_function(torch.matmul, (a, b))
            else:
                node = graph.call_method(name, (a, b) if name == "add" else (a,))
            values.append(node)
            breaks.extend([node] if is_break else [])

    add(program, True)
    graph.output(tuple(values[1:]))
    return fx.GraphModule({}, graph), breaks


class Described(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def seen(outputs: Any) -> list[Any]:
    return [(out.dtype, out.requires_grad, out.detach().tolist()) for out in outputs]


@given(program=blocks)
def test_parts_compute_what_the_whole_does_and_leave_no_mode_on(program: Block) -> None:
    gm, breaks = build(program)
    x = torch.linspace(-1, 1, 4).view(2, 2).requires_grad_()
    before = modes()
    Described(gm).run(x)
    expected = seen(gm(x))
    assert modes() == before
    take_out_switches(gm)
    assert not [node for node in ops_of(gm) if node.target in SWITCHES]
    glue = split(gm, assign_stages(gm, breaks))
    for _, part in calls_of_stages(glue):
        part.graph.lint()
    assert seen(glue(x)) == expected
    assert modes() == before
