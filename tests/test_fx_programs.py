"""Random FX programs through make_graphed_callables: each is eager's, forward and backward, or refused by name."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from strategies_fx import FLOAT_INPUTS, Program, programs
from torch.fx import symbolic_trace
from torch.utils import _pytree as pytree
from twins import significant_strides

import fxgraph


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and how it is graphed and called.

    Attributes:
        program: the program.
        form: ``function`` as it is, or a graph module: ``symbolic_trace`` or ``make_fx``.
        grad: for each input whether it requires grad, if it is of floating point.
        leaves: whether inputs are leaves; else each is the result of an op.
        on_uncapturable: the option.
    """

    program: Program
    form: str = "function"
    grad: tuple[bool, ...] = (False, False, False)
    leaves: bool = True
    on_uncapturable: str = "split"

    def callable(self) -> Callable[..., Any]:
        """A new one, with tensors of its own."""
        if self.form == "make_fx":
            return self.program.trace()
        function = self.program.function()
        if self.form == "symbolic_trace":
            try:
                torch.manual_seed(0)
                return symbolic_trace(function)
            except Exception:  # Python that loops over sizes: symbolic_trace has many words for what it cannot do
                return function
        return function

    def arguments(self, other_values: bool = False) -> list[torch.Tensor]:
        """New inputs, of one of two sets of values."""
        result = self.program.arguments()
        for one, grad in zip(result, self.grad, strict=False):
            if other_values:
                if one.is_floating_point():
                    one.mul_(-0.75).add_(0.125)
                else:
                    one.copy_(one.flip(0))
            one.requires_grad_(grad and one.is_floating_point())
        return result


UNLIKE_EAGER = ("aten._unsafe_view({a}, {a}.shape)",)
"""Its schema says that it gives new memory, which tracing relies on; in eager it is a view."""


def drawn(**more: Any) -> st.SearchStrategy[Program]:
    """Programs for these tests."""
    return programs(without=UNLIKE_EAGER, **more)


def cases(chosen: st.SearchStrategy[Program], *forms: str) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        chosen,
        st.sampled_from(forms),
        st.tuples(st.booleans(), st.booleans(), st.booleans()),
        st.booleans(),
        st.sampled_from(["split", "split", "error"]),
    )


# -- what a run comes to ----------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor as plain data: NaN equals itself, 0.0 differs from -0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), significant_strides(tensor), raw


def gradient(tensor: torch.Tensor | None) -> Any:
    """A gradient as plain data; zeros have no sign, since eager's kernels and their decompositions differ in it."""
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), bits(tensor + 0.0)[-1])


def observe(case: Case, call: Callable[..., Any], backward: bool = True) -> dict[str, Any]:
    """Two calls with other values each, both forwards before the first backward: all that a caller can see."""
    torch.manual_seed(7)
    runs = []
    for other_values in (True, False):
        arguments = case.arguments(other_values)
        given = arguments if case.leaves else [one * 1 if one.requires_grad else one for one in arguments]
        versions = [one._version for one in given]
        leaves, spec = pytree.tree_flatten(call(*given))
        runs.append((arguments, given, leaves, spec, versions))
    seen: dict[str, Any] = {"random numbers": bytes(torch.get_rng_state().tolist())}
    for i, (_, given, leaves, spec, _) in enumerate(runs):
        everything = [*leaves, *given]
        tensors = [one for one in everything if isinstance(one, torch.Tensor)]
        storages = [one.untyped_storage()._cdata for one in tensors]
        seen[f"structure, call {i}"] = repr(spec)
        for name, of in (("outputs", leaves), ("inputs", given)):
            seen[f"{name}, call {i}"] = [bits(one) if isinstance(one, torch.Tensor) else one for one in of]
        seen[f"requires grad, call {i}"] = [one.requires_grad for one in tensors]
        seen[f"memory, call {i}"] = [storages.index(one) for one in storages]
    if not backward:
        return seen
    for i, (arguments, given, leaves, _, versions) in enumerate(runs):
        # Not an input that is as it was: its own tangent would be a gradient from outside of the node, and three
        # gradients are added up in another order than in eager.
        same = {id(one) for one, before in zip(given, versions, strict=True) if one._version == before}
        candidates = {
            id(one): one for one in [*leaves, *given] if isinstance(one, torch.Tensor) and id(one) not in same
        }
        learnt = [one for one in candidates.values() if one.grad_fn is not None]
        tangents = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).view(one.shape) for one in learnt]
        if learnt:
            torch.autograd.backward(learnt, tangents)
        seen[f"gradients, call {i}"] = [gradient(one.grad) for one in arguments]
    seen["random numbers, in the end"] = bytes(torch.get_rng_state().tolist())
    return seen


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what differs, with both."""
    return [
        f"{name}: {found[name]!r}, in eager {expected[name]!r}" for name in expected if found[name] != expected[name]
    ]


def run(case: Case) -> str:
    """Graph and call it; assert that it is right or refused. Gives what happened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's on views and empty sums, ours on what runs eagerly
        eager = case.callable()
        try:
            expected = observe(case, eager)
        except Exception as error:  # whatever eager raises
            expected = {}
            eager_error = error
        sample = case.arguments()
        if not case.leaves:
            sample = [one * 1 if one.requires_grad else one for one in sample]
        untouched, state = list(map(bits, sample)), torch.get_rng_state()
        options = {"on_uncapturable": case.on_uncapturable, "engine": "cpu"}
        target = case.callable()
        try:
            torch.set_rng_state(state)
            graphed = fxgraph.make_graphed_callables(target, tuple(sample), allow_unused_input=True, options=options)
            assert list(map(bits, sample)) == untouched, "graphing changed the sample"
            assert torch.equal(torch.get_rng_state(), state), "graphing drew random numbers"
            found = observe(case, graphed)
        except fxgraph.FxgraphError as error:
            assert error.id
            return f"refused: {error.id}"
        except AssertionError:
            raise
        except Exception as error:  # right only if eager raises the same
            if expected or type(error) is not type(eager_error):
                raise
            return "raised as in eager"
        if not expected:
            return "eager alone raises"
        wrong = differences(found, expected)
        assert not wrong, "\n".join([str(case.program), *wrong])
        if isinstance(target, torch.nn.Module):
            theirs = dict(eager.named_buffers())
            assert all(torch.equal(one, theirs[name]) for name, one in target.named_buffers())
        counts = fxgraph.stats(graphed)
        return "captured" if not counts.eager_calls else "eager" if not counts.replays else "captured in parts"


@given(case=cases(drawn(), "make_fx", "symbolic_trace"))
def test_a_graph_module_is_eagers_or_refused(case: Case) -> None:
    event(run(case))


@given(case=cases(drawn(choices=FLOAT_INPUTS), "make_fx", "function"))
def test_gradients_are_eagers_or_refused(case: Case) -> None:
    case = dataclasses.replace(case, grad=(True, *case.grad[1:]))
    event(run(case))


@given(case=cases(drawn(choices=FLOAT_INPUTS, breaks=True, max_lines=7), "function", "symbolic_trace"))
def test_what_depends_on_data_is_eagers_or_refused(case: Case) -> None:
    event(run(case))


@pytest.mark.parametrize(
    "lines",
    [("x0 * 2", "x0 * v0"), ("x0[x0 > 0].sum() * x0",), ("torch.rand_like(x0)", "x0 * v0")],
)
def test_the_comparison_can_fail(lines: tuple[str, ...]) -> None:
    """A program that is off by one rounding, and one that draws other numbers, are noticed."""
    case = Case(Program((FLOAT_INPUTS[0],), lines, (f"v{len(lines) - 1}",)), grad=(True,))
    expected = observe(case, case.callable())
    assert not differences(observe(case, case.callable()), expected)
    assert differences(observe(case, lambda x: (case.program.function()(x)[0] * (1 + 2**-23),)), expected)
