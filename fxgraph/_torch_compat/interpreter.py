"""torch's interpreter of operator graphs: a list of operator calls on fixed tensors, run by one call from Python.

``torch._C.Graph`` and the interpreter under TorchScript need no compiler, and no source: the graph is put together node
by node. A call costs what the dispatcher costs, without Python's share. The graph runs as it is written: it is made for
torch's simple executor, which neither profiles nor rewrites.

TorchScript as a language is being retired. Where a part of this is missing, or an operator or argument does not fit,
:func:`interpreted` gives None and the caller makes the calls itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class OperatorCall(NamedTuple):
    """An operator and what it is called with.

    Attributes:
        op: the overload, or another function of tensors, which the interpreter cannot call.
        args: positional arguments.
        kwargs: by name; ``out`` arguments too.
        copied_to: for each result the tensor that it is copied to, None where it is not needed. Empty where the
            operator itself writes into its arguments.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copied_to: tuple[torch.Tensor | None, ...] = ()


class _DoesNotFit(Exception):
    """The interpreter's graph has no place for a value."""


_PARTS = ("Graph", "ScriptList", "_create_function_from_graph", "_jit_set_profiling_mode", "_ExcludeDispatchKeyGuard")
_AVAILABLE = all(hasattr(torch._C, name) for name in _PARTS)
_MEMORY_FORMATS = {  # c10::MemoryFormat
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_FAILED = "The following operation failed in the TorchScript interpreter."


def fits(call: OperatorCall) -> bool:
    """Whether the interpreter can make this call."""
    if not _AVAILABLE or not isinstance(call.op, torch._ops.OpOverload):
        return False
    try:
        _Builder().add(call)
    except _DoesNotFit:
        return False
    return True


def interpreted(calls: Sequence[OperatorCall]) -> Callable[[], None]:
    """One function that makes all of these calls in their order, on these very tensors.

    The calls are dispatched below autograd: no history, no version counts. Every call must fit (:func:`fits`), and the
    function must be called inside of :func:`as_written` for its first time.

    Raises:
        RuntimeError: from the function, whatever an operator raises, with the operator's own message.
    """
    builder = _Builder()
    for call in calls:
        builder.add(call)
    function = builder.function()
    tensors = torch._C.ScriptList(builder.tensors)  # stays in C++; a list would be converted at each call
    return lambda: _run(function, tensors)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Functions of :func:`interpreted` that run for their first time in here will never be rewritten.

    A function keeps the executor that it gets at its first run.
    """
    if not _AVAILABLE:
        yield
        return
    profiling = torch._C._jit_set_profiling_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_profiling_mode(profiling)


def _run(function: Any, tensors: Any) -> None:
    try:
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS):
            function(tensors)
    except RuntimeError as error:
        _, failed_here, rest = str(error).partition(_FAILED)
        if not failed_here:
            raise
        raise RuntimeError(rest.rpartition("\nRuntimeError: ")[2].rstrip("\n")) from error


_ABOVE_KERNELS: Any = None
if _AVAILABLE:
    _ABOVE_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    _ABOVE_KERNELS |= torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _number(value: complex, given: Sequence[Any]) -> torch.Tensor:
    """A tensor for a Python number where the operator takes a tensor.

    Python's bindings mark such a tensor as a number, which then has the least say in the type of the result. A tensor
    without dimensions has as little against one that has dimensions and a type of at least the same kind.

    Raises:
        _DoesNotFit: where there is no such tensor.
    """
    others = [other for other in given if isinstance(other, torch.Tensor) and other.dim() > 0]
    if not any(torch.result_type(other, value) == other.dtype for other in others):
        raise _DoesNotFit
    types = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    return torch.tensor(value, dtype=types[type(value)], device="cpu")


class _Builder:
    """A graph that takes the list of all tensors and gives nothing."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._graph: Any = torch._C.Graph()  # its type stub lacks half of it
        given = self._graph.addInput("tensors")
        given.setType(torch._C.ListType(torch._C.TensorType.get()))
        self._unpack = self._graph.create("prim::ListUnpack", [given], 0)
        self._graph.appendNode(self._unpack)
        self._values: dict[int, Any] = {}  # by the tensors' identity; `tensors` keeps them alive

    def add(self, call: OperatorCall) -> None:
        """Append a call.

        Raises:
            _DoesNotFit: if the interpreter would not make exactly this call.
        """
        schema = call.op._schema  # type: ignore[attr-defined]  # an overload: it fits
        if any(str(returned.type) != "Tensor" for returned in schema.returns):
            raise _DoesNotFit
        given = list(call.args)
        values = []
        for position, argument in enumerate(schema.arguments):
            if position < len(given) and not argument.kwarg_only:
                value = given[position]
            elif argument.name in call.kwargs:
                value = call.kwargs[argument.name]
            elif argument.has_default_value():
                value = argument.default_value
            else:
                raise _DoesNotFit
            if isinstance(value, (int, float, complex)) and isinstance(argument.type, torch._C.TensorType):
                value = _number(value, given)
            values.append(self._value(value, argument.type))
        node = self._graph.create(schema.name, values, len(schema.returns))
        self._graph.appendNode(node)
        if node.schema() != str(schema):  # the interpreter chooses the overload by the types of the arguments
            raise _DoesNotFit
        for result, target in zip(node.outputs(), call.copied_to, strict=False):
            if target is not None:
                copy = [self._value(target, None), result, self._graph.insertConstant(False)]
                self._graph.appendNode(self._graph.create("aten::copy_", copy, 1))

    def function(self) -> Any:
        """The finished graph as something to be called with a ``ScriptList`` of :attr:`tensors`."""
        self._graph.registerOutput(self._graph.insertConstant(None))
        return torch._C._create_function_from_graph("fxgraph_region", self._graph)

    def _value(self, value: Any, wanted: Any) -> Any:
        """The node's input for a Python value where a type of the schema is wanted."""
        if isinstance(wanted, torch._C.OptionalType) and value is not None:
            wanted = wanted.getElementType()
        if isinstance(value, torch.Tensor):
            if id(value) not in self._values:
                self.tensors.append(value)
                self._values[id(value)] = self._unpack.addOutput()
            return self._values[id(value)]
        if isinstance(wanted, torch._C.ListType):
            return self._list(value if isinstance(value, (list, tuple)) else [value], wanted)
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        elif isinstance(wanted, torch._C.FloatType) and type(value) is int:
            value = float(value)
        try:
            return self._graph.insertConstant(value)
        except (TypeError, RuntimeError) as error:  # no constant of the interpreter's
            raise _DoesNotFit from error

    def _list(self, values: Sequence[Any], wanted: Any) -> Any:
        element = wanted.getElementType()
        node = self._graph.create("prim::ListConstruct", [self._value(value, element) for value in values], 1)
        self._graph.appendNode(node)
        node.output().setType(wanted)
        return node.output()
