"""passes/effects.py: what a node writes, draws and changes, operator by operator and against torch's own knowledge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch.compile_utils import rand_ops
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from passes.effects import (
    Effects,
    changes_metadata,
    is_pure,
    is_random,
    is_uninitialised,
    is_view,
    returned_objects,
    written_inputs,
)

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call whose arguments given as text are placeholders of that name."""
    graph = Graph()
    made: dict[str, Node] = {}

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(item) for item in value]
        return made.setdefault(value, graph.placeholder(value)) if isinstance(value, str) else value

    node = graph.call_function(target, tuple(map(place, args)), {key: place(value) for key, value in kwargs.items()})
    graph.output(node)
    return node


NORM = ("x", None, None, "mean", "var")
WRITES: list[tuple[Node, list[str]]] = [
    (call(aten.add.Tensor, "x", "y"), []),
    (call(aten.add_.Tensor, "x", "y"), ["x"]),
    (call(aten.copy_.default, "x", "y"), ["x"]),
    (call(aten.add.out, "x", "y", out="z"), ["z"]),
    (call(aten._foreach_copy_.default, ["x", "y"], ["a", "b"]), ["x", "y"]),
    (call(aten.detach_.default, "x"), []),
    (call(aten.native_batch_norm.default, *NORM, True, 0.1, 1e-5), ["mean", "var"]),
    (call(aten.native_batch_norm.default, *NORM, False, 0.1, 1e-5), []),
    (call(aten.cudnn_batch_norm.default, *NORM, True, 0.1, 1e-5), ["mean", "var"]),
    (call(aten._native_batch_norm_legit.default, *NORM, True, 0.1, 1e-5), ["mean", "var"]),
    (call(aten._native_batch_norm_legit_functional.default, *NORM, True, 0.1, 1e-5), []),
    (call(aten.batch_norm.default, *NORM, True, 0.1, 1e-5, False), ["mean", "var"]),
    (call(aten.instance_norm.default, *NORM, True, 0.1, 1e-5, False), ["mean", "var"]),
    (call(torch.ops.higher_order.auto_functionalized, aten.neg.default, x="x"), ["x"]),
]


@pytest.mark.parametrize(("node", "expected"), WRITES, ids=lambda value: str(getattr(value, "target", "")))
def test_what_a_node_writes(node: Node, expected: list[str]) -> None:
    assert [source.name for source in written_inputs(node)] == expected
    assert not (expected and is_pure(node))


def test_every_operator_that_torch_knows_as_random_is_random_here() -> None:
    for packet in rand_ops:
        overloads = [getattr(packet, name) for name in packet.overloads() if name != "out" and "out" not in name]
        assert any(is_random(call(op)) for op in overloads), packet


def functional_twins() -> list[OpOverload]:
    """ATen's in-place operators: their names end in an underscore and they write their first argument."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if qualified.startswith("aten::") and name.endswith("_") and not name.endswith("__") and hasattr(aten, name):
            op = getattr(getattr(aten, name), overload or "default", None)
            if op is not None and op._schema.arguments and "Tensor" in str(op._schema.arguments[0].type):
                found.append(op)
    return found


def test_no_in_place_operator_of_torch_is_taken_as_pure() -> None:
    found = functional_twins()
    assert len(found) > 200
    for op in found:
        node = call(op, *(["x"] if str(op._schema.arguments[0].type).startswith("List") else "x"))
        assert not is_pure(node), op
        assert written_inputs(node) or changes_metadata(node), op


def test_kinds_of_operators() -> None:
    assert is_view(call(aten.t.default, "x"))
    assert is_view(call(aten.split.Tensor, "x", 1))
    assert not is_view(call(aten.reshape.default, "x", [3, 2]))
    assert not is_view(call(aten.add.Tensor, "x", "y"))
    assert is_uninitialised(call(aten.empty.memory_format, [2]))
    assert is_uninitialised(call(aten.new_empty_strided.default, "x", [2], [1]))
    assert not is_uninitialised(call(aten.zeros.default, [2]))
    assert changes_metadata(call(aten.t_.default, "x"))
    assert changes_metadata(call(aten.resize_.default, "x", [2]))
    assert not changes_metadata(call(aten.add_.Tensor, "x", "y"))
    assert not is_pure(call(aten._assert_async.msg, "x", "text"))
    assert not is_pure(call(torch.ops.higher_order.cond, "x", None, None, []))


def test_storages_writes_and_lifetimes_of_a_graph() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        mine = x + 1  # add
        part = mine[0]  # select
        part.mul_(2)  # mul_
        y.add_(1)  # add_
        return part.exp(), mine.t()  # exp, t

    gm = make_fx(program, tracing_mode="fake")(X.clone(), X.clone())
    nodes = {node.name: node for node in gm.graph.nodes}
    effects = Effects.of(gm)
    assert effects.is_written(nodes["add"]) and effects.is_written(nodes["select"])
    assert effects.is_written(nodes["x_1"])  # it may lie where y does
    assert not effects.is_written(nodes["exp"])
    assert effects.escapes(nodes["select"]) and effects.escapes(nodes["exp"]) and effects.escapes(nodes["y_1"])
    place = effects.position
    assert effects.written_between(nodes["add"], place[nodes["select"]], place[nodes["mul_"]])
    assert not effects.written_between(nodes["add"], place[nodes["mul_"]], place[nodes["t"]])
    assert effects.last_use(nodes["add"]) == place[gm.graph.output_node()]
    assert returned_objects(gm.graph) == {nodes["exp"], nodes["t"]}


def test_an_operator_written_in_terms_of_others_may_return_its_argument() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [6]))
    same = graph.call_function(aten.contiguous.default, (view,))
    written = graph.call_function(aten.add_.Tensor, (same, 1))
    graph.output(written)
    assert returned_objects(graph) == {view, same, written}
