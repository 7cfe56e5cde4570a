"""A graph as text that a person reads: one line per node with the user's file:line, a mark under a node, a diff of
two.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .constraint import Report
from .facts import describe_call, value_of, where_of

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def show_node(node: Node) -> str:
    """Return one line: ``%add : f32[4, 8] cpu = aten.add.Tensor(%x, 1)  # model.py:12``.

    Strides are given where the tensor is not contiguous.
    """
    if node.op == "output":
        text = f"return {_show(node.args[0])}"
    else:
        kind = show_value(value_of(node))
        text = f"%{node.name}" + (f" : {kind}" if kind else "") + f" = {_right_side(node)}"
    place = where_of(node)
    return text + (f"  # {os.path.basename(place.file)}:{place.line}" if place.file else "")


def show(gm: GraphModule) -> str:
    """Return the whole graph, one line per node."""
    return "\n".join(show_node(node) for node in gm.graph.nodes)


def mark(node: Node, note: str = "") -> str:
    """Return the graph of ``node`` with ``^^^^`` and ``note`` under its line."""
    lines = []
    for other in node.graph.nodes:
        lines.append(show_node(other))
        if other is node:
            lines.append("^" * len(lines[-1]) + (f" {note}" if note else ""))
    return "\n".join(lines)


def show_report(gm: GraphModule, report: Report) -> str:
    """Return the graph with a mark and ``[id] observed`` under each node that a violation names, then the report."""
    notes: dict[str | None, list[str]] = {}
    for violation in report.violations:
        notes.setdefault(violation.where.node, []).append(f"[{violation.id}] {violation.observed}")
    lines = []
    for node in gm.graph.nodes:
        lines.append(show_node(node))
        width = len(lines[-1])
        lines.extend("^" * width + f" {note}" for note in notes.get(node.name, ()))
    return "\n".join([*lines, "", str(report)])


def diff(before: str, after: str, name: str = "pass") -> str:
    """Return the unified diff of two graphs given as text (`show`); empty if they are the same."""
    old, new = before.splitlines(), after.splitlines()
    return "\n".join(difflib.unified_diff(old, new, f"before {name}", f"after {name}", lineterm=""))


def show_value(value: Any) -> str:
    """Return a fake value as text: ``f32[4, 8] cpu``, with strides where not contiguous; a tuple of these; or empty."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        text = f"{_SHORT_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
        if value.layout != torch.strided:
            return f"{text} {value.layout} {value.device}"
        if not _is_contiguous(value):
            text += f" strides {_show(tuple(value.stride()))}"
        return f"{text} {value.device}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(show_value(item) or "none" for item in value) + ")"
    return "" if value is None else f"{type(value).__name__} {value}"


def _is_contiguous(value: torch.Tensor) -> bool:
    """Whether the strides are the usual ones, as far as they mean anything: not for sizes 0 and 1. Adds no guard."""
    sizes: list[Any] = list(value.shape)
    if any(not isinstance(size, torch.SymInt) and size == 0 for size in sizes):
        return True
    wanted: Any = 1
    for size, stride in zip(reversed(sizes), reversed(value.stride()), strict=True):
        if isinstance(size, torch.SymInt) or size != 1:
            if str(stride) != str(wanted):
                return False
            wanted = wanted * size
    return True


def _right_side(node: Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op + ("" if str(node.target) == node.name else f" {node.target}")
    arguments = [_show(argument) for argument in node.args]
    arguments += [f"{key}={_show(argument)}" for key, argument in node.kwargs.items()]
    return f"{describe_call(node)}({', '.join(arguments)})"


def _show(argument: Any) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(_show(item) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, slice):
        return f"slice({_show(argument.start)}, {_show(argument.stop)}, {_show(argument.step)})"
    if isinstance(argument, dict) and any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(argument)):
        return "{" + ", ".join(f"{key!r}: {_show(item)}" for key, item in argument.items()) + "}"
    return repr(argument)
