"""What Dynamo reads and does not guard by itself: each change of it is seen, by both entries."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxgraph

ENTRIES = ["make_graphed_callables", "torch.compile"]


def graphed_by(entry: str, function: Any, *samples: torch.Tensor) -> Any:
    if entry == "torch.compile":
        return torch.compile(function, backend="graphed")
    return fxgraph.make_graphed_callables(function, samples)


class Thing:
    """With attributes of the user's."""


class Falling(dict):
    def __missing__(self, key: str) -> float:
        return 1.0


def by_key(held: Any) -> float:
    try:
        return held["a"]
    except KeyError:
        return 1.0


def by_attribute(held: Any) -> float:
    try:
        return held.a
    except AttributeError:
        return 1.0


def by_index(held: Any) -> float:
    try:
        return held[2]
    except IndexError:
        return 1.0


def by_attribute_of_an_element(held: Any) -> float:
    try:
        return held["thing"].a
    except (KeyError, AttributeError):
        return 1.0


def put(key: str) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, 4.0)


# what is held, what is read of it, what changes
MISSING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a key": (dict, by_key, put("a")),
    "another key is there": (lambda: {"b": 2.0}, by_key, put("a")),
    "a key of an OrderedDict": (collections.OrderedDict, by_key, put("a")),
    "a key of a ChainMap": (lambda: collections.ChainMap({}, {"a": 2.0}), by_key, put("a")),
    "get": (dict, lambda held: held.get("a", 1.0), put("a")),
    "in": (dict, lambda held: held["a"] * 1 if "a" in held else 1.0, put("a")),
    "a default": (lambda: collections.defaultdict(lambda: 1.0), lambda held: held["a"], put("a")),
    "__missing__": (Falling, lambda held: held["a"], put("a")),
    "an attribute": (Thing, by_attribute, lambda held: setattr(held, "a", 4.0)),
    "getattr": (Thing, lambda held: getattr(held, "a", 1.0), lambda held: setattr(held, "a", 4.0)),
    "hasattr": (Thing, lambda held: held.a if hasattr(held, "a") else 1.0, lambda held: setattr(held, "a", 4.0)),
    "an attribute of an element": (
        lambda: {"thing": Thing()},
        by_attribute_of_an_element,
        lambda held: setattr(held["thing"], "a", 4.0),
    ),
    "an index": (lambda: [1.0], by_index, lambda held: held.extend([2.0, 4.0])),
    "an element of a set": (set, lambda held: 4.0 if "a" in held else 1.0, lambda held: held.add("a")),
}


class Holding(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.held)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("where", ["attribute", "closure"])
@pytest.mark.parametrize("name", MISSING)
def test_what_was_missing_is_found_when_it_comes(name: str, where: str, entry: str, device: str) -> None:
    make, read, change = MISSING[name]
    held, x = make(), torch.ones(2, device=device)
    function = Holding(held, read) if where == "attribute" else lambda x: x * read(held)
    graphed = graphed_by(entry, function, x)
    before = [graphed(x) for _ in range(2)]
    change(held)
    after = [graphed(x) for _ in range(2)]
    assert all(torch.equal(one, before[0]) for one in before)
    assert all(torch.equal(one, x * 4) for one in after)
    assert not torch.equal(before[0], x * 4)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_attribute_of_the_module_itself_comes_and_goes(entry: str, device: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                scale = self.scale
            except AttributeError:
                scale = 1.0
            return x * scale

    module, x = Scaled(), torch.ones(2, device=device)
    graphed = graphed_by(entry, module, x)
    for scale in (None, 4.0, None, 2.0):
        if scale is None:
            vars(module).pop("scale", None)
        else:
            module.scale = scale
        for _ in range(2):
            assert torch.equal(graphed(x), x * (scale or 1.0))


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")  # of grad_fn Dynamo makes a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.is_leaf,
        lambda x: x.grad_fn is not None,
        lambda x: x._base is not None,
        lambda x: getattr(x, "is_leaf"),  # noqa: B009  # found among the constants of the code
    ],
)
def test_what_an_argument_is_to_autograd_is_seen_where_the_callable_asks(asks: Any, entry: str, device: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if asks(x) else 3.0)

    leaf, base = torch.ones(3, device=device, requires_grad=True), torch.ones(4, 3, device=device, requires_grad=True)
    graphed = graphed_by(entry, f, leaf)
    for x in (leaf, leaf * 1, base[0], leaf, torch.ones(3, device=device), base.detach()[0], base[1] * 1):
        assert torch.equal(graphed(x), f(x))


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_ordered_dict_in_another_order_is_another_program(entry: str, device: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = collections.OrderedDict(add=1.0, more=2.0)
            self.tensors = collections.OrderedDict(a=torch.ones(2, device=device), b=torch.zeros(2, device=device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for value in self.steps.values():
                x = x * 2 + value
            return x - next(iter(self.tensors.values()))

    x, net = torch.ones(2, device=device), Net()
    plain = copy.deepcopy(net)
    net = graphed_by(entry, net, x)
    for change in (None, ("steps", "add"), None, ("tensors", "a"), ("steps", "more"), ("tensors", "b")):
        for module in (net, plain):
            if change is not None:
                getattr(module, change[0]).move_to_end(change[1])
        for _ in range(2):
            assert torch.equal(net(x), plain(x))
