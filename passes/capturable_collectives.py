"""The rule on collectives: what runs on the stream alone, by the backend of the process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import op_lists
from .capturable_ops import OpConstraint
from .facts import (
    argument,
    constant_of,
    describe_call,
    input_tensors_of,
    is_aten,
    overload_of,
    schema_argument,
    tensors_of,
)

COLLECTIVE_NAMESPACES: frozenset[str] = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of the operators of torch.distributed."""

_GROUP = ("group_name", "process_group")  # what their schemas call the process group


def backend_of_group(name: str) -> str | None:
    """Return the backend of the process group called ``name``, or None if there is no such group in this process.

    A group with several is given as torch does, ``cpu:gloo,cuda:nccl``.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d as c10d  # absent in builds without torch.distributed

    try:
        group = c10d.__dict__["_resolve_process_group"](name)  # not among the module's declared names
    except (LookupError, RuntimeError, ValueError):  # what the registry raises for an unknown name, by torch version
        return None
    backend = str(torch.distributed.get_backend(group))
    return backend if backend != "undefined" else str(c10d.get_backend_config(group))  # chosen by device


@dataclass(frozen=True)
class Collective(OpConstraint):
    """No collective runs on a backend that needs the host, or on a process group of which nothing is known.

    Those of the backends in ``stream_backends`` are ordinary work on the stream and are fine, except the ones during
    which the host waits on any backend (``barrier``).
    """

    id: ClassVar[str] = "collective"
    title: ClassVar[str] = "a collective cannot be captured"
    why: ClassVar[str] = "the host takes part in it, and a replay runs without the host"
    hint: ClassVar[str] = "use the nccl backend, or communicate outside of the graphed callable"

    expected: ClassVar[str] = "a collective that runs on the stream alone"

    stream_backends: tuple[str, ...] = op_lists.STREAM_BACKENDS
    backend_of: Callable[[str], str | None] = backend_of_group

    def reason(self, node: Node) -> str | None:
        """Return the collective and its backend, or None."""
        op = overload_of(node)
        name = op._schema.name.partition("::")[2] if op is not None else getattr(node.target, "__name__", "")
        is_op = op is not None and op.namespace in COLLECTIVE_NAMESPACES
        is_python = not is_aten(node) and (getattr(node.target, "__module__", "") or "").startswith("torch.distributed")
        if name in op_lists.NEVER_ON_STREAM and (is_op or is_python):
            return f"{describe_call(node)} makes the host wait"
        if not (is_op and _communicates(node)) and not (is_python and _takes_group(node)):
            return None
        group = _group_name(node)
        config = None if group is None else self.backend_of(group)
        if config is None:
            return f"{describe_call(node)} on a process group that is not known here"
        refused = [backend for backend in _backends(config, node) if backend not in self.stream_backends]
        return f"{describe_call(node)} on the backend {', '.join(refused)}" if refused else None


def _backends(config: str, node: Node) -> list[str]:
    """The backends that serve the tensors of a call; all of the group's where their devices are not known."""
    if ":" not in config:
        return [config]
    by_device = dict(part.split(":") for part in config.split(","))
    devices = {tensor.device.type for tensor in (*input_tensors_of(node), *tensors_of(node))}
    return sorted({by_device.get(device, "none") for device in devices} or set(by_device.values()))


def _communicates(node: Node) -> bool:
    """Whether an operator of torch.distributed takes a process group, or waits for one that does."""
    op = overload_of(node)
    names = {argument.name for argument in op._schema.arguments} if op is not None else set()
    return not names.isdisjoint(_GROUP) or (op is not None and op._schema.name.endswith("::wait_tensor"))


def _takes_group(node: Node) -> bool:
    """Whether a Python function of torch.distributed takes values of the graph and a process group."""
    return bool(node.all_input_nodes) and "group" in inspect.signature(_callee(node)).parameters


def _callee(node: Node) -> Callable[..., Any]:
    assert callable(node.target), "only functions have a module"
    return node.target


def _group_name(node: Node) -> str | None:
    """The name of the process group that a collective, or the wait for one, belongs to; None if it is not known."""
    op = overload_of(node)
    if op is not None and op.namespace in COLLECTIVE_NAMESPACES:
        if op._schema.name.endswith("::wait_tensor"):
            sources = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
            return _group_name(sources[0]) if sources else None
        return next(filter(None, (_name(schema_argument(node, op, argument)) for argument in _GROUP)), None)
    if getattr(node.target, "__name__", "") == "getitem":
        source = argument(node, "a", 0)
        return _group_name(source) if isinstance(source, Node) else None
    if op is None and callable(node.target) and _takes_group(node):
        given = inspect.signature(_callee(node)).bind_partial(*node.args, **node.kwargs).arguments.get("group")
        if given is None and torch.distributed.is_initialized():
            given = torch.distributed.group.WORLD
        return _name(given)
    return None


def _name(group: Any) -> str | None:
    """The name of a process group that stands in a graph as its name, as an object, or as an attribute of that kind."""
    held = constant_of(group) if isinstance(group, Node) else group
    held = getattr(held, "real_obj", held)  # of a fake script object
    if isinstance(held, torch.ScriptObject):
        try:
            held = torch.distributed.ProcessGroup.unbox(held)
        except RuntimeError:  # a script object of another class
            return None
    name = held if isinstance(held, str) else getattr(held, "group_name", None)
    return name if isinstance(name, str) else None
