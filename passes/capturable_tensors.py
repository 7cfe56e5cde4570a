"""Rules on the values of a graph: their devices, layouts and types; and on custom ops and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from . import op_lists
from .capturable_ops import OpConstraint, host_copy
from .constraint import NodeConstraint, Satisfied, Verdict, Violation
from .contract_arguments import PLAIN_TENSOR_TYPES, layout_of
from .facts import CALLS, describe_call, input_tensors_of, is_aten, name_of, overload_of, tensors_of, value_of, where_of

_TRACED_TENSOR_TYPES: frozenset[type] = PLAIN_TENSOR_TYPES | {FakeTensor, FunctionalTensor}
_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd"})
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


@dataclass(frozen=True)
class SeveralDevices(NodeConstraint):
    """All ops work on one device (type and index): that of the graph's first value that is not on the CPU.

    So a CPU graph satisfies the rule. Copies between host and device are `HostSync`'s; meta values do not count.
    """

    id: ClassVar[str] = "several-devices"
    title: ClassVar[str] = "tensors are on several devices"
    why: ClassVar[str] = "a CUDA graph holds the work of one device, and would use a CPU tensor as it was at capture"
    hint: ClassVar[str] = "create or move every tensor on one device; pass a number instead of a 0-dim CPU tensor"

    def violations(self, subject: GraphModule) -> Iterator[Violation]:
        """Yield one violation per op that works elsewhere, nested GraphModules included."""
        home = home_device(subject.graph)
        for node in subject.graph.nodes:
            verdict = self._verdict(node, home)
            if isinstance(verdict, Violation):
                yield verdict
            child = subject.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(child, GraphModule):
                yield from self.violations(child)

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node, given the device of its graph."""
        return self._verdict(node, home_device(node.graph))

    def _verdict(self, node: Node, home: torch.device | None) -> Verdict:
        if home is None or node.op not in CALLS or host_copy(node) is not None:
            return Satisfied(self)
        placed: dict[torch.device, list[str]] = {}
        for source in (*node.all_input_nodes, node):
            for tensor in tensors_of(source):
                label = "its result" if source is node else source.name
                if not tensor.is_meta and label not in placed.setdefault(tensor.device, []):
                    placed[tensor.device].append(label)
        if not any(device != home for device in placed):
            return Satisfied(self)
        listed = "; ".join(f"{device}: {', '.join(names)}" for device, names in placed.items())
        return self.violation(where_of(node), f"{describe_call(node)} on {listed}", f"everything on {home}")


def home_device(graph: torch.fx.Graph) -> torch.device | None:
    """Return the device of the graph's first tensor that is neither on the CPU nor meta; None if there is none."""
    devices = (tensor.device for node in graph.nodes for tensor in tensors_of(node))
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


@dataclass(frozen=True)
class UnsupportedLayout(OpConstraint):
    """No op reads or gives a tensor that is sparse, quantised, nested or mkldnn."""

    id: ClassVar[str] = "unsupported-layout"
    title: ClassVar[str] = "a tensor is not a plain strided one"
    why: ClassVar[str] = "a replay reads and writes one buffer of fixed address and size per tensor"
    hint: ClassVar[str] = "stay with dense tensors, or convert outside of the region"
    expected: ClassVar[str] = "dense tensors with layout torch.strided"

    def reason(self, node: Node) -> str | None:
        """Return the op and the layout, or None."""
        for tensor in (*tensors_of(node), *input_tensors_of(node)):
            layout = layout_of(tensor)
            if layout is not None:
                return f"{describe_call(node)} on {layout}"
        if name_of(node) in op_lists.EXOTIC_LAYOUT:
            return f"{describe_call(node)} makes one"
        for source in node.all_input_nodes:
            if value_of(source) is None and name_of(source) in op_lists.EXOTIC_LAYOUT:
                return f"{describe_call(node)} on what {source} makes"
        return None


@dataclass(frozen=True)
class TensorSubclass(OpConstraint):
    """No op reads or gives a tensor of a subclass that the tracer did not take apart."""

    id: ClassVar[str] = "tensor-subclass"
    title: ClassVar[str] = "a tensor is of a subclass of torch.Tensor"
    why: ClassVar[str] = "a subclass may run Python of its own at every op, which a replay cannot"
    hint: ClassVar[str] = (
        "trace with AOTAutograd, which takes wrapper subclasses apart, or pass the plain tensors inside"
    )
    expected: ClassVar[str] = "plain tensors"

    def reason(self, node: Node) -> str | None:
        """Return the op and the subclass, or None."""
        for tensor in (*tensors_of(node), *input_tensors_of(node)):
            if type(tensor) not in _TRACED_TENSOR_TYPES and not tensor.is_nested:
                return f"{describe_call(node)} on {type(tensor).__module__}.{type(tensor).__qualname__}"
        return None


@dataclass(frozen=True)
class NoFakeImpl(OpConstraint):
    """Every custom op has a fake implementation: register_fake, a Meta kernel, or a composite one."""

    id: ClassVar[str] = "no-fake-impl"
    title: ClassVar[str] = "a custom op has no fake implementation"
    why: ClassVar[str] = "without it the shapes of what follows are unknown before the op has run on real data"
    hint: ClassVar[str] = "add one with torch.library.register_fake"
    expected: ClassVar[str] = "a fake, Meta or composite kernel"

    def reason(self, node: Node) -> str | None:
        """Return the op, or None."""
        op = overload_of(node)
        if op is None or op.namespace in _TORCH_NAMESPACES or has_fake_kernel(op):
            return None
        return f"{describe_call(node)} has real kernels only"


def backend_of_group(name: str) -> str | None:
    """Return the backend of the process group called ``name``, or None if there is no such group in this process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d as c10d  # absent in builds without torch.distributed

    try:
        group = c10d.__dict__["_resolve_process_group"](name)  # not among the module's declared names
    except (LookupError, RuntimeError, ValueError):  # what the registry raises for an unknown name, by torch version
        return None
    return str(torch.distributed.get_backend(group))


@dataclass(frozen=True)
class Collective(OpConstraint):
    """No collective runs on a backend that needs the host.

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
        is_collective = op is not None and op.namespace in _COLLECTIVE_NAMESPACES
        is_python = not is_aten(node) and (getattr(node.target, "__module__", "") or "").startswith("torch.distributed")
        if name in op_lists.NEVER_ON_STREAM and (is_collective or is_python):
            return f"{describe_call(node)} makes the host wait"
        if not is_collective:
            return None
        group = _group_name(node)
        backend = None if group is None else self.backend_of(group)
        if backend is None or backend in self.stream_backends:
            return None
        return f"{describe_call(node)} on the backend {backend}"


def _group_name(node: Node) -> str | None:
    """The name of the process group that a functional collective, or the wait for one, belongs to."""
    op = overload_of(node)
    if op is None or op.namespace not in _COLLECTIVE_NAMESPACES:
        source: Any = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
        return _group_name(source) if isinstance(source, Node) else None
    names = [argument.name for argument in op._schema.arguments]
    if "group_name" in names:
        position = names.index("group_name")
        group = node.kwargs.get("group_name", node.args[position] if position < len(node.args) else None)
        return group if isinstance(group, str) else None
    sources = [leaf for leaf in pytree.tree_leaves(node.args) if isinstance(leaf, Node)]
    return _group_name(sources[0]) if op._schema.name.endswith("::wait_tensor") and sources else None
