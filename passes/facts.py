"""What can be read off one FX node: its operator, its tensors, its place in the user's code. Nothing is changed."""

from __future__ import annotations

import functools
import operator
import os
import re
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from .constraint import Where

_HERE = os.path.dirname(os.path.abspath(__file__))
# Frames in these folders are never the user's. The sibling package that builds on this one is known by its path only.
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_LIBRARY_FOLDERS = tuple(
    os.path.join(folder, "") for folder in (_TORCH, _HERE, os.path.join(os.path.dirname(_HERE), "fxgraph"))
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)', re.MULTILINE)


def is_library_file(file: str) -> bool:
    """Return whether ``file`` belongs to torch, to this package or to generated FX code, rather than to the user."""
    return file.startswith("<eval_with_key") or file.startswith(_LIBRARY_FOLDERS)


def where_of(node: Node, path: str | None = None) -> Where:
    """Return the node's name and the innermost frame of its stack trace that is in the user's own files, if any."""
    frames = list(_FRAME.finditer(node.stack_trace or ""))
    for frame in reversed(frames):
        if not is_library_file(frame["file"]):
            return Where(file=frame["file"], line=int(frame["line"]), node=node.name, path=path)
    return Where(node=node.name, path=path)


CALLS = ("call_function", "call_method", "call_module")
"""The kinds of node that compute something."""


def ops_of(gm: GraphModule) -> list[Node]:
    """Return the nodes of a graph that compute something, in order."""
    return [node for node in gm.graph.nodes if node.op in CALLS]


def value_of(node: Node) -> Any:
    """Return the fake value that the tracer left on ``node``, or None.

    AOTAutograd, make_fx and export call it ``val``, Dynamo ``example_value``.
    """
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def constant_of(node: Node) -> Any:
    """Return what is known of a node's value before any call: an attribute's object, else its fake value, else None."""
    owner = node.graph.owning_module
    if node.op == "get_attr" and owner is not None:
        return operator.attrgetter(str(node.target))(owner)
    return value_of(node)


def called_module(node: Node) -> torch.nn.Module | None:
    """Return the module that a node calls; None where it calls something else, or its graph has no module."""
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def output_args(gm: GraphModule) -> tuple[Any, ...]:
    """Return the values that a graph returns as a flat tuple or list."""
    returned: Any = gm.graph.output_node().args[0]
    return tuple(returned)


def tensors_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the node's value, in order: fake ones, or the one that an attribute without them holds."""
    value = value_of(node)
    value = constant_of(node) if value is None else value
    if value is None or isinstance(value, torch.Tensor):  # nearly always, and rules ask for each node many times
        return () if value is None else (value,)
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def input_tensors_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors of all nodes that ``node`` reads, in order."""
    return tuple(tensor for source in node.all_input_nodes for tensor in tensors_of(source))


def dtype_of(arg: Any) -> torch.dtype | None:
    """Return the dtype of an argument of a node: of a node's fake tensor, or of a tensor constant; None if unknown."""
    value = value_of(arg) if isinstance(arg, Node) else arg
    return value.dtype if isinstance(value, torch.Tensor) else None


def overload_of(node: Node) -> OpOverload | None:
    """Return the operator that ``node`` calls, or None.

    A packet (``torch.ops.ns.name``) counts if it has one overload or a ``default`` one.
    """
    target = node.target
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        names = target.overloads()
        chosen = "default" if "default" in names else names[0]
        return getattr(target, chosen) if "default" in names or len(names) == 1 else None
    return None


_SIZES = frozenset(
    {"size", "stride", "dim", "ndimension", "numel", "nelement", "storage_offset", "element_size", "len"}
)
_STAND_IN = torch.empty(2)  # of two elements: a schema takes a tensor of one for a number


def operator_of(node: Node) -> OpOverload | None:
    """Return the operator that ``node`` calls: `overload_of`, or that which a torch function or a method comes down to.

    That is the overload which the arguments choose, as torch itself chooses it, where the name is that of an ATen
    operator. A value of which nothing is known counts as a tensor, unless it is computed from sizes alone. None for
    functions of torch that are written in Python, which may have other arguments than the operator of that name.
    """
    found, name = overload_of(node), name_of(node)
    if found is not None or name is None or not _is_native(node):
        return found
    return _resolved(node, name, _stand_in)


def read_as_number(node: Node) -> Node | None:
    """Return the tensor that a torch function or a method is given where it takes a number, which it reads from it.

    A size that is an input of the graph, or computed from one, may be a number.
    """
    name = name_of(node)
    if name is None or overload_of(node) is not None or not _is_native(node):
        return None
    if _resolved(node, name, _stand_in) is not None:
        return None
    for tensor in filter(computes_tensor, node.all_input_nodes):
        if _resolved(node, name, functools.partial(_stand_in, number=tensor)) is not None:
            return tensor
    return None


def computes_tensor(node: Any) -> bool:
    """Return whether a node's value is a tensor that some op has computed, as far as the graph shows it."""
    if not isinstance(node, Node) or node.op not in CALLS:
        return False
    value = value_of(node)
    if value is not None or _is_number(node):
        return isinstance(value, torch.Tensor)
    if str(getattr(node.target, "__module__", "")) in ("_operator", "operator", "builtins"):
        return any(map(computes_tensor, node.all_input_nodes))
    return name_of(node) is not None


def _resolved(node: Node, name: str, stand_in: Callable[[Node], Any]) -> OpOverload | None:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), stand_in)
    try:
        overload = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:  # no schema fits: sizes that are spread over the arguments, names of dimensions
        return None
    return getattr(packet, overload, None)


def _is_native(node: Node) -> bool:
    """Whether a torch function or a method is bound to C++, where it has the operator's arguments."""
    target = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if isinstance(target, types.BuiltinFunctionType):
        return target.__module__ != "_operator"
    return isinstance(target, (types.MethodDescriptorType, OpOverloadPacket))


def _stand_in(node: Node, number: Node | None = None) -> Any:
    """Something of the type of the node's value, as far as the choice of an overload depends on it."""
    if node is number:
        return 1
    value = constant_of(node)
    if isinstance(value, torch.Tensor) or (value is None and not _is_number(node)):
        return _STAND_IN
    if value is None or isinstance(value, torch.SymInt):
        return 1
    return 1.0 if isinstance(value, torch.SymFloat) else value


def _is_number(node: Node) -> bool:
    """Whether a node without a value is a number: a size, or what Python computes of sizes."""
    if node.op == "placeholder":
        return node.type in (int, float, bool)
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "itemsize")
    if name_of(node) in _SIZES or node.target is len:
        return True
    computes = node.op == "call_function" and getattr(node.target, "__module__", "") in (
        "_operator",
        "math",
        "builtins",
    )
    return computes and bool(node.all_input_nodes) and all(map(_is_number, node.all_input_nodes))


@cache
def _functions() -> dict[int, str]:
    """Ids of torch's and `operator`'s functions and of tensor methods -> their plain names, for torch-level graphs."""
    named: dict[int, str] = {}
    for owner in (operator, torch.Tensor, torch.nn.functional, torch.special, torch.linalg, torch):
        # ATen's name of torch.linalg.inv is linalg_inv.
        prefix = "special_" if owner is torch.special else "linalg_" if owner is torch.linalg else ""
        for name in dir(owner):
            function = getattr(owner, name, None)
            if callable(function) and not isinstance(function, type):
                named[id(function)] = prefix + name
    return named


def name_of(node: Node) -> str | None:
    """Return the plain name of what a node calls.

    It is ``nonzero`` for ``aten.nonzero.default``, ``torch.nonzero(x)``, ``x.nonzero()`` and ``torch.Tensor.nonzero``;
    None for anything that is not torch's, and for higher-order operators.
    """
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, OpOverload) else target
        namespace, _, name = packet._qualified_op_name.partition("::")
        return name if namespace in ("aten", "prims") else None
    return _functions().get(id(target))


def is_aten(node: Node) -> bool:
    """Return whether ``node`` calls a torch operator (``torch.ops...``) rather than a Python function or method."""
    return isinstance(node.target, (OpOverload, OpOverloadPacket))


def describe_call(node: Node) -> str:
    """Return the callee as a person writes it: ``aten.add.Tensor``, ``torch.nonzero``, ``Tensor.item``."""
    target = node.target
    if node.op == "call_method":
        return f"Tensor.{target}"
    if node.op == "call_module":
        return f"module {target!r}"
    if isinstance(target, (OpOverload, OpOverloadPacket, str)):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.{target.namespace}.{target.name()}"
    return describe_callable(target)


def describe_callable(function: Callable[..., Any]) -> str:
    """Return ``module.name`` of a Python callable, as short as stays unambiguous; of an object, that of its class."""
    if isinstance(function, functools.partial):
        return f"functools.partial of {describe_callable(function.func)}"
    module = getattr(function, "__module__", None) or ""
    module = module if module.startswith("__") else module.removeprefix("_")  # operator for _operator; __main__ stays
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__qualname__
    known = _functions().get(id(function))
    if known is not None and module in ("", "torch", "torch.functional"):
        return f"Tensor.{known}" if type(function).__name__ == "method_descriptor" else f"torch.{known}"
    return f"{module}.{name}" if module else name


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device in one phrase: ``shape (4, 8), torch.float32, cpu``."""
    shape = ", ".join(str(size) for size in tensor.shape)
    shape = f"({shape},)" if tensor.dim() == 1 else f"({shape})"
    return f"shape {shape}, {tensor.dtype}, {tensor.device}"


def argument(node: Node, name: str, position: int) -> Any:
    """Return an argument of a call by keyword or position (``self`` counts as 0); None when it is absent."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else None


def schema_argument(node: Node, op: OpOverload, name: str) -> Any:
    """Return the argument called ``name`` in the schema of ``op``.

    It is the default where the call omits it, None where the schema has no such argument.
    """
    for position, declared in enumerate(op._schema.arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args) and not declared.kwarg_only:
                return node.args[position]
            return declared.default_value
    return None
