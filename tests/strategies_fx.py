"""Hypothesis strategies: random programs over ATen as Python source, and what a run of one comes to.

A drawn `Program` is text: ``print(program)`` gives source that runs as it stands. Each line is tried on real tensors
while it is drawn, so that every program runs; what a line may be is in `LINES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

INPUTS = (
    "torch.arange(6.0).reshape(2, 3)",
    "torch.arange(6.0).reshape(3, 2).t()",
    "torch.arange(12.0).reshape(2, 6)[:, ::2]",
    "torch.linspace(-1, 1, 9).reshape(3, 3)",
    "torch.linspace(-2, 2, 24).reshape(1, 2, 3, 4)",
    "torch.linspace(-2, 2, 24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)",
    "torch.tensor(0.5)",
    "torch.tensor([1, 0, 2])",
    "torch.tensor([True, False, True])",
    "torch.linspace(0, 1, 3, dtype=torch.float64)",
)
"""Expressions for inputs: contiguous, transposed, sliced, channels last, a scalar, whole numbers, a mask, doubles."""

LINES: dict[str, tuple[str, ...]] = {
    "arithmetic": (
        *("{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} * 2", "{a} + 0.0", "{a} + -0.0", "-{a}", "{a} / 3"),
        *("torch.relu({a})", "torch.tanh({a})", "torch.where({a} > 0, {a}, {b})", "{a} > {b}", "{a}.abs()"),
    ),
    "reductions": (
        *("{a}.sum()", "{a}.sum(0)", "{a}.sum(-1, keepdim=True)", "{a}.amax()", "{a}.argmax()", "{a}.mean(0)"),
        *("torch.var_mean({a}, dim=0)[0]", "torch.var_mean({a}, dim=0)[1]", "torch.cumsum({a}, 0)"),
    ),
    "matrices": ("{a} @ {b}", "{a} @ {b}.t()", "torch.addmm({b}, {a}, {a}.t())", "torch.softmax({a}, -1)"),
    "views": (
        *("{a}.t()", "{a}.reshape(-1)", "{a}.view(-1)", "{a}.view({a}.shape)", "{a}[0]", "{a}[:1]", "{a}[:]"),
        *("{a}[..., 1:]", "{a}.unsqueeze(0)", "{a}.squeeze()", "{a}.transpose(0, -1)", "{a}.expand(2, *{a}.shape)"),
        *("{a}.expand({a}.shape)", "{a}.detach()", "{a}.split(1)[0]", "{a}.split(1)[-1]", "{a}.unbind(0)[0]"),
        *("{a}.permute(tuple(range({a}.dim())))", "aten.alias({a})", "{a}.diagonal()"),
        "aten._unsafe_view({a}, {a}.shape)",
    ),
    "copies": (
        *("{a}.clone()", "{a}.contiguous()", "{a}.contiguous(memory_format=torch.channels_last)", "{a}.double()"),
        *("{a}.float()", "{a}.long()", "{a}.to({a}.dtype, copy=True)", "torch.cat([{a}, {b}])", "{a}.flip(0)"),
        *("{a}.clone(memory_format=torch.contiguous_format)", "torch.stack([{a}, {a}])", "torch.zeros_like({a})"),
        *("torch.full((2, 3), 0.5)", "torch.ones(3)", "torch.arange(3)", "torch.tensor(2.0) * {a}"),
    ),
    "indexing": (
        *("{a}[torch.tensor([0, 0])]", "{a}.index_select(0, torch.tensor([0]))", "{a}.gather(0, {b})"),
        *("aten.index_put({a}, [torch.tensor([0])], {a}[:1])", "{a}.masked_fill({a} > 0, 1.5)", "{a}.take({b})"),
    ),
    "in place": (
        *("{a}.add_({b})", "{a}.add_(1)", "{a}.mul_(2)", "{a}.copy_({b})", "{a}.zero_()", "{a}.relu_()"),
        *("{a}.fill_(3)", "{a}[0].mul_(2)", "{a}.t().add_(1)", "{a}.index_put_((torch.tensor([0]),), {b})"),
        *("{a}[:1].copy_({b})",),
        *("{a}.masked_fill_({a} > 0, 1.5)", "{a}.view(-1).sub_(1)"),
    ),
    "random": (
        *("torch.rand_like({a})", "torch.randn(2, 3)", "torch.dropout({a}, 0.5, True)"),
        *("torch.dropout({a}, 0.5, False)",),
        *("torch.bernoulli(torch.full((2, 3), 0.5))", "torch.empty_like({a}).uniform_()", "torch.randperm(3)"),
        *("{a}.normal_()", "{a}.clone().bernoulli_(0.5)"),
    ),
}  # fmt: skip
"""What a line may compute, by kind; ``{a}`` and ``{b}`` stand for earlier values."""

BREAKS = (
    *("{b} * {a}[{a} > 0].sum()", "{b} + {a}.nonzero().sum()", "{b} * {a}.sum().item()", "{a}[{a} > 0]"),
    *("{b} + torch.bincount({a}.abs().long().reshape(-1)).amax()", "{b} * float({a}.amax())"),
    "torch.masked_select({a}, {a} > 0) * 2",
)
"""Lines whose values or sizes depend on data: no graph holds them."""

OUTPUTS = ("({})", "[{}]", "({{'all': [{}], 'rest': (None, 3)}},)")
"""How what is returned is nested; filled with ``a, b, ``."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of its inputs, as source.

    Attributes:
        inputs: expressions for the inputs ``x0, x1, ...``.
        lines: expressions for the values ``v0, v1, ...``, in order.
        returned: names of the values that are returned; a name may come twice.
        form: out of `OUTPUTS`.
    """

    inputs: tuple[str, ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]
    form: str = OUTPUTS[0]

    def __str__(self) -> str:
        names = ", ".join(f"x{index}" for index in range(len(self.inputs)))
        body = "\n".join(f"    v{index} = {line}" for index, line in enumerate(self.lines))
        values = "".join(f"{name}, " for name in self.returned)
        return (
            f"import torch\n\naten = torch.ops.aten\n\n\ndef forward({names}):\n{body}\n"
            f"    return {self.form.format(values)}\n\n\ntorch.manual_seed(0)\nforward({', '.join(self.inputs)})"
        )

    __repr__ = __str__

    def arguments(self) -> list[torch.Tensor]:
        """New inputs."""
        return [eval(expression, {"torch": torch}) for expression in self.inputs]

    def function(self) -> Callable[..., Any]:
        """The function, compiled from the source."""
        scope: dict[str, Any] = {}
        exec(str(self).partition("\n\n\ntorch.manual_seed")[0], scope)
        return scope["forward"]

    def trace(self, mode: str = "fake", pre_dispatch: bool = False) -> GraphModule:
        """The ATen graph, with everything in it that the program computes: make_fx keeps dead code.

        With ``pre_dispatch``, operators that are written in terms of others (``reshape``, ``to``) stay as they are.
        """
        torch.manual_seed(0)
        return make_fx(self.function(), tracing_mode=mode, pre_dispatch=pre_dispatch)(*self.arguments())


KINDS = tuple(LINES)


FLOAT_INPUTS = tuple(one for one in INPUTS if "tensor([" not in one)
"""Those inputs that can require grad."""


@st.composite
def programs(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = KINDS,
    max_lines: int = 9,
    write_back: bool = False,
    choices: tuple[str, ...] = INPUTS,
    breaks: bool = False,
    without: tuple[str, ...] = (),
) -> Program:
    """Random programs, whose lines are of the given kinds; every sixth line or so repeats an earlier one.

    With ``write_back`` they end with copies into inputs, as a program in functional form does. Inputs are out of
    ``choices``. With ``breaks``, one line or two are out of `BREAKS` (none where none fits). No other line
    is of a template in ``without``.
    """
    inputs = tuple(draw(st.lists(st.sampled_from(choices), min_size=1, max_size=3)))
    scope: dict[str, Any] = {"torch": torch, "aten": aten}
    names = [f"x{index}" for index in range(len(inputs))]
    for name, expression in zip(names, inputs, strict=True):
        scope[name] = eval(expression, {"torch": torch})
    lines: list[str] = []
    torch.manual_seed(0)
    count = draw(st.integers(1, max_lines))
    broken = draw(st.sets(st.integers(0, count), min_size=1, max_size=2)) if breaks else set()
    for place in range(count + bool(breaks)):
        if place in broken:
            template = draw(st.sampled_from(BREAKS))
            line = template.format(a=draw(st.sampled_from(names)), b=draw(st.sampled_from(names)))
        elif lines and draw(st.integers(0, 5)) == 0:
            line = draw(st.sampled_from(lines))
        else:
            templates = LINES[draw(st.sampled_from(kinds))]
            template = draw(st.sampled_from([one for one in templates if one not in without]))
            line = template.format(a=draw(st.sampled_from(names)), b=draw(st.sampled_from(names)))
        try:
            value = eval(line, scope)
        except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):  # what does not fit, or only barely
            continue
        if value.numel() > 200:
            continue
        names.append(f"v{len(lines)}")
        scope[names[-1]] = value
        lines.append(line)
    if not lines:
        lines.append("x0 + 1")
        names.append("v0")
        scope["v0"] = scope["x0"] + 1
    returned = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    for name in draw(st.permutations(names[: len(inputs)])) if write_back else ():
        fitting = [other for other in names if scope[other].shape == scope[name].shape]
        line = f"{name}.copy_({draw(st.sampled_from(fitting))})"
        try:
            eval(line, scope)
        except RuntimeError:  # both are parts of one memory
            continue
        lines.append(line)
    return Program(inputs, tuple(lines), tuple(returned), draw(st.sampled_from(OUTPUTS)))


# -- what a run comes to ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a caller can see of one run, as plain data.

    Attributes:
        values: of the outputs and then of the inputs: dtype, sizes, strides, offset, bytes; others as they are.
        structure: of the outputs.
        memory: for each of these tensors, the place of the first one on its storage.
        same: for each of these tensors, the place of the first one that is the same object.
        random: the state of the default generator afterwards.
    """

    values: tuple[Any, ...]
    structure: str
    memory: tuple[int | None, ...]
    same: tuple[int | None, ...]
    random: bytes


def outcome(function: Callable[..., Any], arguments: list[torch.Tensor]) -> Outcome:
    """Run ``function`` with the generator in a fixed state."""
    torch.manual_seed(7)
    leaves, spec = pytree.tree_flatten(function(*arguments))
    everything = [*leaves, *arguments]
    tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in everything]
    storages = [None if tensor is None else tensor.untyped_storage()._cdata for tensor in tensors]
    identities = [None if tensor is None else id(tensor) for tensor in tensors]
    return Outcome(
        tuple(map(describe, everything)),
        repr(spec),
        tuple(None if one is None else storages.index(one) for one in storages),
        tuple(None if one is None else identities.index(one) for one in identities),
        bytes(torch.get_rng_state().tolist()),
    )


def describe(value: Any) -> Any:
    """A tensor as plain data, bit by bit (so that NaN equals itself and 0.0 differs from -0.0)."""
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0)
    place = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    return (value.dtype, *place, bytes(raw.tolist()))
