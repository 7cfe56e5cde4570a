"""The fake values of a torch-level graph, made anew after passes have changed it.

Rules and rewrites judge a graph by the values that its tracer left on the nodes. A pass that changes a call in place
leaves the value of the call that was there, and everything that comes after it has a value that followed from that.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target

from .facts import ops_of, value_of
from .fakes import at_first_place, failures_unlogged
from .modes import SWITCHES

_ASSERT = torch.ops.aten._assert_scalar.default


def refresh_values(gm: GraphModule) -> tuple[Node, Exception] | None:
    """Run a graph of Dynamo's on the fake values of its inputs, and leave what each op gives as its ``example_value``.

    Gives the op that fails, if one does, and what it raises.

    Asserts on numbers that turn out to be known are removed: Dynamo puts them behind every op whose size depends on
    data, and they would stay where a pass takes such an op out. From an op on that fails the values are removed, for
    they are those of another graph. Graphs that are not described, or that hold what cannot simply be run again
    (higher-order ops, switches of grad mode and autocast), keep the values that they have.
    """
    mode = next((value.fake_mode for node in gm.graph.nodes if isinstance(value := value_of(node), FakeTensor)), None)
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    if mode is None or any(value is None for value in inputs) or any(map(_is_no_plain_op, ops_of(gm))):
        return None
    symbols = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env is not None else contextlib.nullcontext()
    values = _Values(gm, mode)
    with failures_unlogged(), mode, symbols, contextlib.suppress(_Stopped):
        values.run(*inputs, enable_io_processing=False)
    for node in gm.graph.find_nodes(op="call_function", target=_ASSERT):
        if value_of(condition) is True if isinstance(condition := node.args[0], Node) else condition is True:
            gm.graph.erase_node(node)
    gm.recompile()
    return values.failed


def _is_no_plain_op(node: Node) -> bool:
    return node.op == "call_module" or isinstance(node.target, HigherOrderOperator) or node.target in SWITCHES


class _Stopped(Exception):
    """An op cannot be run on fake values; those from there on have been removed."""


class _Values(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm)
        self._mode = mode
        self.failed: tuple[Node, Exception] | None = None

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            held = operator.attrgetter(str(n.target))(self.module)
            value = value_of(n)
            if value is None:
                value = self._mode.from_tensor(held, static_shapes=True) if isinstance(held, torch.Tensor) else held
        else:
            try:
                value = super().run_node(n)
            except Exception as error:  # whatever the op raises; it will raise it again where the graph is run
                self.failed = n, error
                self._forget_from(n)
                raise _Stopped from error
        n.meta.pop("val", None)
        n.meta["example_value"] = value
        return value

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, at_first_place(target, args), kwargs)

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_method(target, at_first_place(target, args), kwargs)

    def _forget_from(self, n: Node) -> None:
        while n.op != "root":
            n.meta.pop("val", None)
            n.meta.pop("example_value", None)
            n = n.next
