"""Rules on the arguments and on the tensors that a call reads."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .call_site import CallSite
from .constraint import Constraint, Violation
from .facts import describe_tensor

# Exact types, not isinstance: a subclass may carry mutable state. Functions and classes are constants by identity.
CONSTANT_TYPES: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType}
)
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
PLAIN_TENSOR_TYPES: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True)
class WrongArguments(Constraint[CallSite]):
    """The arguments must bind to the signature of the forward. Without a readable signature, nothing is judged."""

    id: ClassVar[str] = "wrong-arguments"
    title: ClassVar[str] = "the arguments do not fit the signature"
    why: ClassVar[str] = "the call that is to be captured would raise TypeError"
    hint: ClassVar[str] = "pass sample arguments exactly as the real call will pass them"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation if binding fails."""
        target = subject.callable
        if not callable(target):
            return
        try:
            # A decorated function runs its wrapper first, so it is the wrapper's signature that counts.
            target = target.forward if isinstance(target, torch.nn.Module) else target
            signature = inspect.signature(target, follow_wrapped=False)
        except (ValueError, TypeError):  # what inspect raises for builtins without a signature
            return
        try:
            signature.bind(*subject.args, **subject.kwargs)
        except TypeError as error:
            keywords = ", ".join(repr(key) for key in subject.kwargs) or "none"
            count = len(subject.args)
            observed = f"{count} positional argument{'' if count == 1 else 's'}, keywords: {keywords} ({error})"
            expected = f"arguments for {_without_annotations(signature)}"
            yield self.violation(subject.where(), observed, expected)


@dataclass(frozen=True)
class UnsupportedArgument(Constraint[CallSite]):
    """Each leaf of the arguments is a tensor or an immutable constant.

    Constants: None, bool, int, float, complex, str, bytes, slices and ranges, torch's dtype, device, layout,
    memory_format and Size, enum members, functions and classes. Containers: whatever `torch.utils._pytree` knows (list,
    tuple, namedtuple, dict, OrderedDict, defaultdict, deque, registered classes), frozen dataclasses, frozensets.
    """

    id: ClassVar[str] = "unsupported-argument"
    title: ClassVar[str] = "an argument is neither a tensor nor an immutable constant"
    why: ClassVar[str] = "a constant is part of the capture; an object that can change would leave the capture stale"
    hint: ClassVar[str] = (
        "pass tensors and plain constants; make a dataclass frozen or register a container with torch.utils._pytree"
    )

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per such leaf."""
        for path, leaf in subject.leaves():
            if not (isinstance(leaf, (torch.Tensor, enum.Enum, type)) or _is_constant(leaf)):
                observed = f"an object of type {type(leaf).__module__}.{type(leaf).__qualname__}"
                expected = "a tensor, an immutable constant, or a container of these"
                yield self.violation(subject.where(path), observed, expected, _conversion(leaf))


@dataclass(frozen=True)
class TensorSubclass(Constraint[CallSite]):
    """Arguments, parameters and buffers are plain tensors; Parameter and Buffer are the only subclasses allowed."""

    id: ClassVar[str] = "tensor-subclass"
    title: ClassVar[str] = "a tensor is of a subclass of torch.Tensor"
    why: ClassVar[str] = "a subclass may run Python of its own at every op, which a replay cannot"
    hint: ClassVar[str] = (
        "pass the plain tensors that the subclass wraps; run a lazy module once to make its parameters real"
    )

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per such tensor. Nested tensors are the layout rule's."""
        for path, tensor in subject.tensors():
            if type(tensor) not in PLAIN_TENSOR_TYPES and not tensor.is_nested:
                observed = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
                expected = "torch.Tensor, torch.nn.Parameter or torch.nn.Buffer"
                yield self.violation(subject.where(path), observed, expected)


@dataclass(frozen=True)
class UnsupportedLayout(Constraint[CallSite]):
    """Arguments, parameters and buffers are strided and dense: not sparse, quantised, nested or mkldnn."""

    id: ClassVar[str] = "unsupported-layout"
    title: ClassVar[str] = "a tensor is not a plain strided one"
    why: ClassVar[str] = "a replay reads and writes one buffer of fixed address and size per tensor"
    hint: ClassVar[str] = "convert it, e.g. with to_dense(), dequantize() or torch.nested.to_padded_tensor()"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per such tensor."""
        for path, tensor in subject.tensors():
            layout = layout_of(tensor)
            if layout is not None:
                yield self.violation(subject.where(path), layout, "a dense tensor with layout torch.strided")


@dataclass(frozen=True)
class SeveralDevices(Constraint[CallSite]):
    """All tensors that the call reads are on one device (type and index).

    A 0-dim CPU tensor counts: a replay would go on using the number that it held at capture. Meta tensors are another
    rule's.
    """

    id: ClassVar[str] = "several-devices"
    title: ClassVar[str] = "tensors are on several devices"
    why: ClassVar[str] = "a CUDA graph holds the work of one device"
    hint: ClassVar[str] = "move everything to one device with .to(device); a 0-dim CPU tensor too"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per foreign device, naming the tensors on it."""
        placed: dict[torch.device, list[str]] = {}
        for path, tensor in subject.tensors():
            if not tensor.is_meta:
                placed.setdefault(tensor.device, []).append(path)
        if len(placed) < 2:
            return
        home = next((device for device in placed if device.type != "cpu"), next(iter(placed)))
        if subject.module is not None:
            home = next((tensor.device for _, tensor in subject.state() if not tensor.is_meta), home)
        for device, paths in placed.items():
            if device != home:
                more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
                observed = f"{device}: {', '.join(paths[:3])}{more}"
                yield self.violation(subject.where(paths[0]), observed, f"{home}, the device of {placed[home][0]}")


def layout_of(tensor: torch.Tensor) -> str | None:
    """Return what is special about the tensor's layout, or None for a plain strided one."""
    if tensor.is_nested:
        return f"a nested tensor, {tensor.dtype}, {tensor.device}"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}, {describe_tensor(tensor)}"
    if tensor.is_quantized or tensor.dtype in _QUANTISED:  # a fake tensor shows it by its dtype alone
        return f"a quantised tensor, {describe_tensor(tensor)}"
    return None


def _is_constant(leaf: Any) -> bool:
    if isinstance(leaf, slice):
        return all(_is_constant(bound) for bound in (leaf.start, leaf.stop, leaf.step))
    return type(leaf) in CONSTANT_TYPES


def _conversion(leaf: Any) -> str | None:
    package = type(leaf).__module__.partition(".")[0]
    if package == "numpy":
        return "convert it: torch.from_numpy(array) for an array, .item() for a scalar"
    if isinstance(leaf, torch.nn.Module):
        return "make it a submodule of the callable, so that its parameters are known"
    if isinstance(leaf, torch.Generator):
        return "use the default generator: a replay advances no other"
    return None


def _without_annotations(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
