"""Hypothesis strategies: random small modules, random courses of calls on them, and single steps for a state machine.

Everything that is drawn is data (frozen dataclasses and tuples), so that a failing example reads as the program it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

WIDTH = 4

BLOCKS = (
    "linear", "tied", "tied", "layer_norm", "batch_norm", "dropout", "relu", "relu_", "tanh", "residual", "scale",
    "views", "add_", "matmul", "noise", "count", "chunk", "where", "dead",
)  # fmt: skip

FORMS = ("one", "sum", "pair", "views", "whole numbers", "dict", "dict", "detached", "input", "nothing to learn")


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a module consists of.

    Attributes:
        blocks: names out of ``BLOCKS``, in the order in which they run.
        form: what the module gives, out of ``FORMS``.
        image: whether it starts with a convolution over ``[rows, 2, 4, 4]``; else it takes ``[rows, WIDTH]``.
        unused: whether it has a parameter that nothing uses.
        frozen: whether the parameters of every second block ask for no gradient.
    """

    blocks: tuple[str, ...]
    form: str = "one"
    image: bool = False
    unused: bool = False
    frozen: bool = False

    def make(self) -> RandomModule:
        """The module, with parameters drawn from the default generator."""
        return RandomModule(self)

    def sample(self, rows: int, device: str, requires_grad: bool = False) -> torch.Tensor:
        """An input."""
        shape = (rows, 2, 4, 4) if self.image else (rows, WIDTH)
        return torch.randn(shape, device=device, requires_grad=requires_grad)

    @property
    def needs_rows(self) -> int:
        """The least number of rows: in training, BatchNorm wants two."""
        return 2 if "batch_norm" in self.blocks or self.image else 1


class RandomModule(nn.Module):
    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint
        # Python state that the forward reads, for tests that change it.
        self.factor, self.shifts, self.switches, self.bomb = 1.0, [0], {"tanh": False}, None
        if blueprint.image:
            self.conv, self.bn = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.head = nn.Linear(3 * 2 * 2, WIDTH)
        if blueprint.unused:
            self.unused = nn.Parameter(torch.ones(3))
        shared = nn.Linear(WIDTH, WIDTH)
        layers: list[nn.Module] = []
        for i, name in enumerate(blueprint.blocks):
            layer: Any
            if name in ("linear", "residual"):
                layer = nn.Linear(WIDTH, WIDTH)
            elif name == "tied":
                layer = shared
            elif name == "layer_norm":
                layer = nn.LayerNorm(WIDTH)
            elif name == "batch_norm":
                layer = nn.BatchNorm1d(WIDTH)
            elif name == "dropout":
                layer = nn.Dropout(0.25)
            else:
                layer = nn.Module()
                if name in ("scale", "matmul"):
                    layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) if name == "matmul" else torch.randn(WIDTH))
                elif name == "count":
                    layer.register_buffer("steps", torch.zeros((), dtype=torch.int64))
                elif name == "dead":
                    layer.weight = nn.Parameter(torch.randn(WIDTH))
            if blueprint.frozen and i % 2:
                layer.requires_grad_(False)
            layers.append(layer)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        given = x
        if self.blueprint.image:
            x = self.head(F.max_pool2d(self.bn(self.conv(x)).relu(), 2).flatten(1))
        hidden = x
        for i, name in enumerate(self.blueprint.blocks):
            layer = self.layers[i]
            hidden = x
            if name in ("linear", "tied", "layer_norm", "batch_norm", "dropout"):
                x = layer(x)
            elif name == "relu":
                x = x.relu()
            elif name == "relu_":
                x = (x * 1.5).relu_()
            elif name == "tanh":
                x = x.tanh()
            elif name == "residual":
                x = x + layer(x).tanh()
            elif name == "scale":
                x = x * layer.weight
            elif name == "views":
                x = x.t().reshape(-1).view(WIDTH, -1).transpose(0, 1)
            elif name == "add_":
                x = x.clone()
                x[:, 1:].add_(x[:, :1])
            elif name == "matmul":
                x = x @ layer.weight / 2
            elif name == "noise":
                x = x + torch.randn_like(x) * 0.1
            elif name == "count":
                layer.steps.add_(1)
                x = x + layer.steps
            elif name == "chunk":
                first, second = x.chunk(2, dim=1)
                x = torch.cat([second, first * 2], dim=1)
            elif name == "where":
                x = torch.where(x > 0, x, x * 0.25)
            elif name == "dead":
                (x * layer.weight).exp()  # nothing comes of it
        if self.factor != 1.0:
            x = x * self.factor
        for shift in self.shifts:
            if shift:
                x = x + shift
        if self.switches["tanh"]:
            x = x.tanh()
        if self.bomb is not None:
            raise self.bomb
        return self._give(x, hidden, given)

    def _give(self, y: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor) -> Any:
        form = self.blueprint.form
        if form == "one":
            return y
        if form == "sum":
            return y.sum()
        if form == "pair":
            return y, y.square().sum()
        if form == "views":
            y = y * 1.0
            return [y, y.t(), y[0]]
        if form == "whole numbers":
            return y, y.argmax(1), y > 0
        if form == "dict":
            return {"y": y * 1.0, "hidden": hidden * 2.0, "none": None, "n": 3}
        if form == "detached":
            return y, y.detach() * 2
        if form == "input":
            return y * 2, given
        with torch.no_grad():
            return y * 2


blueprints: st.SearchStrategy[Blueprint] = st.builds(
    Blueprint,
    blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5).map(tuple),
    form=st.sampled_from(FORMS),
    image=st.booleans(),
    unused=st.booleans(),
    frozen=st.booleans(),
)
"""Random modules."""

rows = st.sampled_from([3, 3, 3, 2, 5])
"""Numbers of rows: most calls look like the sample."""

actions: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("forward"), rows, st.booleans()),
    st.tuples(st.just("forward"), rows, st.booleans()),
    st.tuples(st.just("forward and backward"), rows, st.booleans()),
    st.tuples(st.just("forward and backward"), rows, st.booleans()),
    st.tuples(st.just("backward"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("backward"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("no_grad"), rows),
    st.tuples(st.just("inference"), rows),
    st.tuples(st.just("keep"), rows),
    st.tuples(st.just("mode"), st.booleans()),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero"), st.booleans()),
    st.tuples(st.just("seed"), st.integers(0, 3)),
    st.tuples(st.just("draw")),
    st.tuples(st.just("assign")),
    st.tuples(st.just("data")),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.just("raise"), rows),
)
"""One thing that a user does."""

courses: st.SearchStrategy[list[tuple[Any, ...]]] = st.lists(actions, min_size=3, max_size=10)
"""What a user does, one after the other."""


# -- steps of the state machine (machine.py carries them out) ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a module is graphed and trained.

    Attributes:
        optimizer: out of ``OPTIMIZERS``.
        max_in_flight, max_captures, verify, grads: the options.
        grad: whether the sample requires grad.
        seed: of the default generators, before the module is made.
        places: whether inputs count as large, and two calls as enough to learn where they lie (``places.py``).
    """

    optimizer: str = "SGD"
    max_in_flight: int = 2
    max_captures: int = 8
    grad: bool = False
    seed: int = 0
    verify: int = 0
    grads: str = "autograd"
    places: bool = False


OPTIMIZERS = ("SGD", "SGD foreach", "Adam", "AdamW foreach")

setups: st.SearchStrategy[Setup] = st.builds(
    Setup,
    optimizer=st.sampled_from(OPTIMIZERS),
    max_in_flight=st.sampled_from([2, 1, 3]),
    max_captures=st.sampled_from([8, 8, 2]),
    grad=st.booleans(),
    seed=st.integers(0, 3),
    verify=st.sampled_from([0, 0, 0, 2]),
    grads=st.sampled_from(["autograd", "in_graph"]),
    places=st.booleans(),
)

LAYOUTS = ("plain", "plain", "plain", "transposed", "sliced", "expanded", "the last one's")
"""How an input lies in memory; the last of them is the input of the call before."""

AUTOGRAD = ("none", "leaf", "leaf", "with history")
"""What autograd knows of an input."""

CONTEXTS = ("plain", "plain", "plain", "plain", "autocast", "autocast", "checkpoint")
"""Under what a module is called."""

_calls = st.tuples(rows, st.sampled_from(LAYOUTS), st.sampled_from(AUTOGRAD), st.sampled_from(CONTEXTS))


def _with_order(drawn: tuple[tuple[Any, ...], list[int]]) -> tuple[Any, ...]:
    return (*drawn[0], tuple(drawn[1]))


_which = st.integers(0, 3)  # which of several things, counted modulo their number
_any = st.integers(-1, 7)  # which of the parameters or layers; -1: all of them

STEPS: dict[str, tuple[int, st.SearchStrategy[tuple[Any, ...]]]] = {
    "call": (3, _calls),
    "call_for_a_loss": (3, _calls),
    "train": (4, _calls),
    "in_flight": (1, st.tuples(_calls, st.permutations(range(2)) | st.permutations(range(3))).map(_with_order)),
    "chain": (1, _calls),
    "backward": (6, st.tuples(_which, st.sampled_from([0, 0, 0, 1, 2]), st.booleans())),
    "backward_again": (1, st.tuples()),
    "backward_of_two": (1, st.tuples(_which, _which)),
    "gradients": (1, st.tuples(_which, st.integers(-2, 7), st.booleans())),  # -2: of the input alone
    "second_order": (1, st.tuples(_which)),
    "drop": (1, st.tuples(_which)),
    "keep": (2, st.tuples(_which)),
    "keep_gradients": (1, st.tuples()),
    "forget": (1, st.tuples()),
    "in_place": (1, st.tuples(_which, _which)),
    "zero_grad": (2, st.tuples(st.booleans())),
    "clip": (1, st.tuples()),
    "optimize": (3, st.tuples()),
    "without_grad": (1, st.tuples(rows, st.sampled_from(LAYOUTS), st.sampled_from(["no_grad", "inference", "keep"]))),
    "mode": (1, st.tuples(_any, st.booleans())),
    "load": (1, st.tuples(st.booleans())),
    "swap_data": (1, st.tuples(_any)),
    "swap_buffer": (1, st.tuples(_which)),
    "replace": (1, st.tuples(_any)),
    "tie": (1, st.tuples(_which, _which)),
    "freeze": (1, st.tuples(_any, st.booleans())),
    "convert": (1, st.tuples(st.booleans())),
    "copy": (1, st.tuples()),
    "hook_output": (1, st.tuples(_which, st.sampled_from(["log", "scale", "raise"]))),
    "hook_parameter": (1, st.tuples(_any, st.sampled_from(["log", "scale", "after", "update"]))),
    "hook_module": (1, st.tuples(st.sampled_from(["log", "scale", "before", "backward"]))),
    "hook_inner": (1, st.tuples(_any, st.sampled_from(["double", "before"]))),
    "unhook": (1, st.tuples()),
    "attribute": (
        1,
        st.one_of(
            st.tuples(st.just("factor"), st.sampled_from([1.0, 2.0, 0.5])),
            st.tuples(st.just("shifts"), st.sampled_from([0, 1])),
            st.tuples(st.just("tanh"), st.booleans()),
        ),
    ),
    "raise_inside": (1, st.tuples(rows)),
    "raise_outside": (1, st.tuples(rows)),
    "bad_input": (1, st.tuples(rows)),
    "seed": (1, st.tuples(_which)),
    "draw": (1, st.tuples()),
    "collect": (1, st.tuples()),
}
"""Names of steps, how often each is to be tried, and what its arguments are. All of them are data, and indices count
modulo what there is: any part of a course of steps is a course of steps."""
