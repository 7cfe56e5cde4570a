"""Rules on the values of a graph: their devices, layouts and types; and on custom ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._library.utils import has_fake_kernel
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule, Node

from . import op_lists
from .capturable_collectives import COLLECTIVE_NAMESPACES
from .capturable_ops import OpConstraint
from .constraint import NodeConstraint, Satisfied, Verdict, Violation
from .contract_arguments import PLAIN_TENSOR_TYPES, layout_of
from .facts import (
    CALLS,
    called_module,
    describe_call,
    input_tensors_of,
    name_of,
    overload_of,
    tensors_of,
    value_of,
    where_of,
)
from .host_copies import host_copy

_TRACED_TENSOR_TYPES: frozenset[type] = PLAIN_TENSOR_TYPES | {FakeTensor, FunctionalTensor}
_TORCH_NAMESPACES = COLLECTIVE_NAMESPACES | {"aten", "prims", "prim"}


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
            yield from self.violations_inside(subject, node)

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
        # Not only where the source has no value: a fake tensor that is mkldnn does not look like one.
        odd = next((source for source in node.all_input_nodes if _is_odd(source)), None)
        if odd is not None:
            return f"{describe_call(node)} on what {odd} makes"
        if name_of(node) in op_lists.EXOTIC_READERS and any(value_of(one) is None for one in node.all_input_nodes):
            return f"{describe_call(node)} reads one"
        held = next(filter(None, map(layout_of, _held_by_module(node))), None)
        return None if held is None else f"{describe_call(node)} holds {held}"


def _is_odd(node: Node) -> bool:
    """Whether a value is made with another layout, or, where nothing else is known of it, follows from one by name."""
    while name_of(node) not in op_lists.EXOTIC_LAYOUT:
        if value_of(node) is not None or name_of(node) not in op_lists.KEEPS_LAYOUT or len(node.all_input_nodes) != 1:
            return any(layout_of(tensor) is not None for tensor in tensors_of(node))
        (node,) = node.all_input_nodes
    return True


def _held_by_module(node: Node) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module that is called as a whole."""
    child = called_module(node)
    if child is not None and not isinstance(child, GraphModule):
        yield from child.parameters()
        yield from child.buffers()


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
