"""Rules on single calls: the arguments fit the operator, and the fake value is what the operator gives for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree

from .constraint import NodeConstraint, Satisfied, Verdict
from .facts import constant_of, describe_call, value_of, where_of
from .fakes import failures_unlogged, fake
from .show import show_value

NOT_ON_FAKES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""What is raised by operators that work, but not on tensors without data."""


@dataclass(frozen=True)
class FitsSchema(NodeConstraint):
    """A call of an operator has as many arguments as its schema takes, by names that it has."""

    id: ClassVar[str] = "fits-schema"
    title: ClassVar[str] = "a call does not fit the operator's schema"
    why: ClassVar[str] = "the operator would refuse it when the graph runs, and rules read arguments by their places"
    hint: ClassVar[str] = "give each argument of the schema once, and no others"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        op = node.target
        wrong = next(_misfits(node, op), None) if isinstance(op, OpOverload) else None
        return (
            Satisfied(self) if wrong is None else self.violation(where_of(node), wrong, str(getattr(op, "_schema", "")))
        )


def _misfits(node: Node, op: OpOverload) -> Iterator[str]:
    """What is wrong with the number and the names of the arguments, in words."""
    declared = op._schema.arguments
    names = [argument.name for argument in declared]
    places = [argument.name for argument in declared if not argument.kwarg_only]
    if len(node.args) > len(places):
        yield f"{describe_call(node)} with {len(node.args)} arguments by place, at most {len(places)} are taken"
    for name in node.kwargs:
        if name not in names:
            yield f"{describe_call(node)} with an argument {name!r}, which it does not have"
        elif name in places[: len(node.args)]:
            yield f"{describe_call(node)} with {name!r} given twice"
    given = {*places[: len(node.args)], *node.kwargs}
    for argument in declared:
        if argument.name not in given and not argument.has_default_value():
            yield f"{describe_call(node)} without {argument.name!r}"


@dataclass(frozen=True)
class CurrentFakeValue(NodeConstraint):
    """The fake value of a call is what its operator gives for the fake values of its arguments.

    Compared are the number of tensors, their sizes, strides, dtypes and devices. Not judged are calls of which that is
    not known without data: of operators that write, or that have no fake implementation; on sizes that are symbols.
    """

    id: ClassVar[str] = "stale-fake-value"
    title: ClassVar[str] = "a node's fake value is not what its call gives"
    why: ClassVar[str] = "rules and passes read shapes, strides and devices off node.meta['val']"
    hint: ClassVar[str] = "set meta['val'] anew on each node that a pass changes, and on those that read it"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        op = node.target
        if not isinstance(op, OpOverload) or op._schema.is_mutable or "val" not in node.meta:
            return Satisfied(self)
        if any(value_of(source) is None and source.op != "get_attr" for source in node.all_input_nodes):
            return Satisfied(self)
        arguments = map_arg((node.args, node.kwargs), _known)
        known, leaves = node.meta["val"], pytree.tree_leaves((arguments, node.meta["val"]))
        modes = {id(leaf.fake_mode): leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)}
        if not modes or any(map(_is_symbolic, leaves)):
            return Satisfied(self)
        mode = next(iter(modes.values())) if len(modes) == 1 else FakeTensorMode()  # make_fx: one for each real tensor
        try:
            given = _run_on_fakes(op, arguments, mode)
        except NOT_ON_FAKES:
            return Satisfied(self)
        except Exception as error:  # whatever the operator raises, it will raise it where the graph is run
            observed = f"{describe_call(node)} raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return self.violation(where_of(node), observed, "a call that works on the fake values of its arguments")
        if any(map(_is_symbolic, pytree.tree_leaves(given))) or _metadata(given) == _metadata(known):
            return Satisfied(self)
        observed = f"{describe_call(node)} with the value {show_value(known) or None}"
        return self.violation(where_of(node), observed, show_value(given) or "None")


def _known(node: Node) -> Any:
    value = value_of(node)
    return constant_of(node) if value is None else value


def _run_on_fakes(op: OpOverload, arguments: Any, mode: FakeTensorMode) -> Any:
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: fake(one, mode), arguments)
    symbols = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else nullcontext()
    with (
        failures_unlogged(),
        mode,
        symbols,
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):  # the graph is below all that
        return op(*args, **kwargs)


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout != torch.strided or any(map(_is_symbolic, (*leaf.shape, *leaf.stride())))
    return isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _metadata(value: Any) -> list[Any]:
    """What is compared. Strides of sizes 0 and 1 mean nothing."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            strides = [
                stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if size != 1 and leaf.numel()
            ]
            found.append((tuple(leaf.shape), strides, leaf.dtype, leaf.device))
        else:
            found.append(type(leaf))
    return found


ON_CHANGED: tuple[NodeConstraint, ...] = (CurrentFakeValue(),)
"""The rules on the nodes that a pass has made or changed."""
