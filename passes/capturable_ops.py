"""Rules on single operators: which of them no CUDA graph can hold, one rule per reason.

They hold on CPU graphs as well, so that a program behaves the same on a machine without a GPU. Torch-level graphs
(symbolic_trace, Dynamo, export) are judged by what they show: a Python call may still run such an op inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from . import op_lists
from .constraint import NodeConstraint, Satisfied, Verdict
from .facts import (
    CALLS,
    argument,
    called_module,
    computes_tensor,
    constant_of,
    describe_call,
    input_tensors_of,
    name_of,
    operator_of,
    overload_of,
    read_as_number,
    schema_argument,
    tensors_of,
    value_of,
    where_of,
)
from .fakes import is_place
from .host_copies import data_of, host_copy, indices_of
from .masks import fills_with_number, is_mask

_INDEXING = frozenset(
    {"getitem", "setitem", "index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}
)


@dataclass(frozen=True)
class OpConstraint(NodeConstraint):
    """A rule whose verdict on a node is a phrase that says what is wrong with its callee, or None."""

    expected: ClassVar[str]

    def reason(self, node: Node) -> str | None:
        """Return what is wrong with ``node``, or None."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it forbids")

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node; placeholders, attributes and the output always satisfy."""
        reason = self.reason(node) if node.op in CALLS else None
        return Satisfied(self) if reason is None else self.violation(where_of(node), reason, self.expected)


@dataclass(frozen=True)
class HostSync(OpConstraint):
    """No op hands a value of the device to the host or makes the host wait, and none copies to or from host memory."""

    id: ClassVar[str] = "host-sync"
    title: ClassVar[str] = "an op makes the host wait for the device"
    why: ClassVar[str] = "a replay runs without the host: what the host read at capture would be used for ever"
    hint: ClassVar[str] = (
        "keep the value as a tensor on the device (torch.where instead of if), or take it out of the region"
    )
    expected: ClassVar[str] = "an op that reads and writes the device only"

    def reason(self, node: Node) -> str | None:
        """Return the read, the check or the copy that involves the host, or None."""
        name, op = name_of(node), operator_of(node)
        if name in op_lists.READS_TO_HOST or (op is not None and torch.Tag.data_dependent_output in op.tags):
            return f"{describe_call(node)} reads a value on the host"
        if name in op_lists.CHECKS_ON_HOST or node.target in op_lists.HOST_FUNCTIONS:
            return f"{describe_call(node)} waits for the device"
        if name is not None and (algebra := _linear_algebra(node, name)) is not None:
            return f"{describe_call(node)} {algebra}"
        if name == "segment_reduce" and _checks_lengths(node):
            return f"{describe_call(node)} without unsafe=True checks the lengths on the host"
        if name == "isin" and _keyword(node, "assume_unique") and _looked_for_by_sorting(node):
            return f"{describe_call(node)} sorts, and copies a flag of the host's into the result"
        if _reads_scalar(op) and not _is_scalar_of_host(node):
            return f"{describe_call(node)} reads a tensor's value on the host"
        if node.target is torch._assert and computes_tensor(argument(node, "condition", 0)):
            return f"{describe_call(node)} looks at a tensor on the host"
        if _counts_batches(node):
            return f"{describe_call(node)} reads how many batches it has seen, as momentum=None asks for"
        if (number := _number_from_tensor(node)) is not None:
            return f"{describe_call(node)} reads a number from {number}"
        if name in op_lists.HOST_BOUNDS and _without_bounds(node):
            return f"{describe_call(node)} without min and max reads them from the data"
        return host_copy(node)

    def is_consequence(self, node: Node) -> bool:
        """Return whether ``node`` only asserts something about a number or a size that an op read from the data.

        Tracers add such asserts behind every op of that kind; it is the op that a report names.
        """
        if name_of(node) != "_assert_scalar":
            return False
        shapes = DataDependentShape()
        waiting, seen = list(node.all_input_nodes), {node}
        while waiting:
            source = waiting.pop()
            if source not in seen and source.op.startswith("call_"):
                seen.add(source)
                if shapes.reason(source) is not None or self.reason(source) is not None:
                    return True
                waiting.extend(source.all_input_nodes)
        return False


@dataclass(frozen=True)
class DataDependentShape(OpConstraint):
    """No op's output shape depends on values, and none looks for the true entries of a mask or for unique values.

    A boolean (or uint8) mask in ``index`` decides the output's shape. In ``index_put`` the shape is known, but on
    CUDA the mask is turned into indices by ``nonzero`` all the same, which waits for the device, unless one number is
    written (`masks.fills_with_number`; torch's own list refuses this case too). The derivative of ``masked_scatter``
    calls ``masked_select``, and ``isin`` calls ``unique`` where there are many values to look for.
    """

    id: ClassVar[str] = "data-dependent-shape"
    title: ClassVar[str] = "an op's output shape depends on values"
    why: ClassVar[str] = "a replay launches the same kernels on the same sizes every time"
    hint: ClassVar[str] = (
        "use a form of fixed size: torch.where or masked_fill for a mask, output_size= for repeat_interleave, "
        "minlength with one_hot().sum() for bincount, topk for a selection, searchsorted for isin"
    )
    expected: ClassVar[str] = "an output shape that follows from the input shapes"

    def reason(self, node: Node) -> str | None:
        """Return the op that decides a shape from values, or None."""
        name, op = name_of(node), operator_of(node)
        if name in op_lists.DATA_DEPENDENT or _is_data_dependent_module(node):
            return describe_call(node)
        if name in op_lists.SELECTING:
            return f"{describe_call(node)} selects by a mask"
        if name == "isin" and not _keyword(node, "assume_unique") and (many := _looked_for_by_sorting(node)):
            return f"{describe_call(node)} with {many} values to look for"
        if name in _INDEXING:
            mask = next((index for index in indices_of(node) if is_mask(index)), None)
            if mask is None or fills_with_number(node):
                return None
            return f"{describe_call(node)} with the boolean mask {mask}"
        if name == "repeat_interleave":
            return f"{describe_call(node)} without output_size" if _repeats_from_data(node) else None
        if name == "where" and len(node.args) + len(node.kwargs) == 1:
            return f"{describe_call(node)} of a condition alone"
        if name == "one_hot":
            classes = argument(node, "num_classes", 1)
            return f"{describe_call(node)} without num_classes" if classes in (None, -1) else None
        if op is not None and torch.Tag.dynamic_output_shape in op.tags:
            return describe_call(node)
        fresh = _fresh_symbols(node)
        return f"{describe_call(node)} with the size {', '.join(fresh)}, which comes from the data" if fresh else None


@dataclass(frozen=True)
class CudagraphUnsafeOp(OpConstraint):
    """No op carries torch's tag ``cudagraph_unsafe`` or is on torch's list of ops that cannot be replayed."""

    id: ClassVar[str] = "cudagraph-unsafe-op"
    title: ClassVar[str] = "an op is known as unsafe in a CUDA graph"
    why: ClassVar[str] = "torch, or the op's author, says that its kernels cannot be replayed"
    hint: ClassVar[str] = "replace the op, or take it out of the region"
    expected: ClassVar[str] = "an op without the tag torch.Tag.cudagraph_unsafe that torch does not list as forbidden"

    def reason(self, node: Node) -> str | None:
        """Return the op and how it is known, or None."""
        op = operator_of(node)
        if op is not None and torch.Tag.cudagraph_unsafe in op.tags:
            return f"{describe_call(node)} carries the tag cudagraph_unsafe"
        return f"{describe_call(node)} is on torch's list" if str(op) in op_lists.FORBIDDEN else None


@dataclass(frozen=True)
class HigherOrderOp(OpConstraint):
    """No op takes a function or a sub-graph, except the wrappers of one kernel in `op_lists.PLAIN_HIGHER_ORDER`.

    Of those in `op_lists.WRAPPERS`, checkpoints and blocks of ``no_grad`` among them, the ops inside are judged.
    """

    id: ClassVar[str] = "higher-order-op"
    title: ClassVar[str] = "an op runs a function or a sub-graph"
    why: ClassVar[str] = "control flow is decided on the host, and what the sub-graph does is not seen here"
    hint: ClassVar[str] = "inline the sub-graph, or write the branch with torch.where"
    expected: ClassVar[str] = "an operator on tensors"

    def reason(self, node: Node) -> str | None:
        """Return the higher-order op, or None."""
        target = node.target
        plain = op_lists.PLAIN_HIGHER_ORDER | op_lists.WRAPPERS | {"print"}  # printing has a rule of its own
        if isinstance(target, HigherOrderOperator) and target.name() not in plain:
            return describe_call(node)
        return None


@dataclass(frozen=True)
class UnregisteredGenerator(OpConstraint):
    """No random op draws from a generator other than the default ones and those in ``registered``."""

    id: ClassVar[str] = "unregistered-generator"
    title: ClassVar[str] = "a random op draws from a generator that is not registered"
    why: ClassVar[str] = "a replay advances the registered generators only; others would repeat the same numbers"
    hint: ClassVar[str] = "drop the generator argument and seed with torch.manual_seed"
    expected: ClassVar[str] = "the default generator of the device"

    registered: tuple[torch.Generator, ...] = ()

    def reason(self, node: Node) -> str | None:
        """Return the call with its foreign generator, or None."""
        known = (torch.default_generator, *torch.cuda.default_generators, *self.registered)
        allowed = {_address(generator) for generator in known}
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            held = constant_of(value) if isinstance(value, Node) else value
            if isinstance(held, torch.Generator) and _address(held) not in allowed:
                return f"{describe_call(node)} with a torch.Generator on {held.device}"
        for key in ("generator", "gen"):
            held = node.kwargs.get(key)
            if isinstance(held, Node) and constant_of(held) is None:
                return f"{describe_call(node)} with the generator {held}, which is not known before the call"
        return None


@dataclass(frozen=True)
class PrintSideEffect(OpConstraint):
    """Nothing writes for a person to read: a replay would not write it again."""

    id: ClassVar[str] = "print-side-effect"
    title: ClassVar[str] = "the graph prints"
    why: ClassVar[str] = (
        "printing happens on the host, so a replay is silent, and printing a tensor waits for the device"
    )
    hint: ClassVar[str] = "print outside, from a returned value"
    expected: ClassVar[str] = "no output from within the graph"

    def reason(self, node: Node) -> str | None:
        """Return what prints, or None."""
        called = overload_of(node) or describe_call(node)
        is_print_op = isinstance(node.target, HigherOrderOperator) and node.target.name() == "print"
        return describe_call(node) if is_print_op or str(called) in op_lists.PRINTERS else None


def _address(generator: torch.Generator) -> int:
    """What tells generators apart: tracers may hold another Python object for the same one."""
    return int(generator._cdata)  # type: ignore[attr-defined]  # not among the class's declared names


def reads_host_scalar(node: Node) -> bool:
    """Return whether ``node`` takes the value of a tensor that lies on the host, as ``masked_fill`` may."""
    return _reads_scalar(operator_of(node)) and any(tensor.is_cpu for tensor in input_tensors_of(node))


def _is_scalar_of_host(node: Node) -> bool:
    """Whether a fill on a device takes its number from the host's memory, where it can be read at once."""
    if name_of(node) not in ("masked_fill", "masked_fill_", "index_fill", "index_fill_"):
        return False
    devices = [tensor.device.type for tensor in input_tensors_of(node) if not tensor.is_meta]
    return len(devices) > 1 and devices[0] != "cpu" and devices[-1] == "cpu"


def _reads_scalar(op: OpOverload | None) -> bool:
    return str(op).removesuffix("_out") in op_lists.SCALARS_ON_HOST


def is_factorised_by_magma(sizes: Sequence[int]) -> bool:
    """Return whether ATen leaves the LU factorisation of matrices of these sizes to MAGMA, which waits for the device.

    The choice is ATen's, ``lu_factor`` in ``aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp``, where
    ``torch.backends.cuda.preferred_linalg_library`` is not set.
    """
    if len(sizes) < 2 or 0 in sizes:
        return False
    *batch, rows, columns = sizes
    count = math.prod(batch)
    return not (rows == columns and (count == 1 or rows <= 16 or (rows <= 128 and count <= 16)))


def _number_from_tensor(node: Node) -> str | None:
    """What tensor an op takes a number from, in words, or None."""
    if (tensor := read_as_number(node)) is not None:
        return str(tensor)
    if (data := data_of(node)) is not None and not isinstance(data, Node):  # a list, say, whose tensors are read
        return next((str(leaf) for leaf in pytree.tree_leaves(data) if computes_tensor(leaf)), None)
    if name_of(node) in ("getitem", "setitem"):
        indices = list(indices_of(node))
        if (place := next((index for index in indices if _is_place(index)), None)) is not None:
            return f"{place}, an index without dimensions"
        slices = [index for index in indices if isinstance(index, slice)]
        bounds = [bound for one in slices for bound in (one.start, one.stop, one.step)]
        return next((f"{bound}, a bound of a slice" for bound in bounds if computes_tensor(bound)), None)
    return None


def _is_place(index: Any) -> bool:
    held = constant_of(index) if isinstance(index, Node) else index
    return isinstance(held, torch.Tensor) and is_place(held)


def _without_bounds(node: Node) -> bool:
    low, high = argument(node, "min", 2), argument(node, "max", 3)
    return (0 if low is None else low) == (0 if high is None else high)


def _linear_algebra(node: Node, name: str) -> str | None:
    """What linear algebra does with the host, or None."""
    looks = "looks at its own result on the host"
    if name in op_lists.STATUS_ON_HOST or (name in op_lists.STATUS_UNLESS_EMPTY and not _is_empty(node)):
        return looks
    if _keyword(node, "check_errors") is True:
        return f"with check_errors {looks}"
    if name in op_lists.INVERTING and isinstance(power := argument(node, "n", 1), int) and power < 0:
        return f"with a negative power {looks}"
    order = node.kwargs.get("p", argument(node, "ord", 1))
    if order in op_lists.SINGULAR_VALUES_FOR.get(name, ()):
        return f"of order {order!r} {looks}"
    if name in op_lists.WAITS_UNLESS_EMPTY and not _is_empty(node):
        return "waits for the device"
    sizes = _first_sizes(node) if name in op_lists.LU_FACTORISING else None
    return f"of shape {sizes} waits for the device" if sizes and is_factorised_by_magma(sizes) else None


def _keyword(node: Node, name: str) -> Any:
    """An argument that Python takes by keyword alone."""
    op = overload_of(node)
    return node.kwargs.get(name) if op is None else schema_argument(node, op, name)


def _sizes(arg: Any) -> tuple[int, ...] | None:
    """The sizes of an argument that is a tensor, where these are known as numbers."""
    value = constant_of(arg) if isinstance(arg, Node) else arg
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _first_sizes(node: Node) -> tuple[int, ...] | None:
    """The sizes of the first tensor that a call reads, where these are known as numbers."""
    return _sizes(next(iter(node.all_input_nodes), None))


def _is_empty(node: Node) -> bool:
    sizes = _first_sizes(node)
    return sizes is not None and 0 in sizes


def _checks_lengths(node: Node) -> bool:
    has_lengths = _keyword(node, "lengths") is not None and _keyword(node, "offsets") is None
    return has_lengths and not _keyword(node, "unsafe")


def _looked_for_by_sorting(node: Node) -> int:
    """How many values an ``isin`` looks for, if they are so many that it sorts them, and 0 else."""
    elements, wanted = (argument(node, name, place) for place, name in enumerate(("elements", "test_elements")))
    number = isinstance(elements, (int, float, complex))
    sizes, wanted_sizes = (() if number else _sizes(elements)), _sizes(wanted)
    if sizes is None or wanted_sizes is None:
        return 0
    count, many = math.prod(sizes), math.prod(wanted_sizes)
    # ATen's own bound (aten/src/ATen/native/TensorCompare.cpp), and numpy's.
    return many if count and many >= int(10 * count**0.145) else 0


def _repeats_from_data(node: Node) -> bool:
    size = _keyword(node, "output_size")
    alone = len(node.args) + ("repeats" in node.kwargs) == 1
    repeats = argument(node, "repeats", 0 if alone else 1)
    return size is None and isinstance(repeats, Node) and not isinstance(value_of(repeats), (int, torch.SymInt))


def _counts_batches(node: Node) -> bool:
    """Whether a call is of a batch norm that takes the plain average of its batches: ``float(num_batches_tracked)``."""
    module = called_module(node)
    if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return False
    return module.momentum is None and module.training and module.track_running_stats


def _is_data_dependent_module(node: Node) -> bool:
    return isinstance(called_module(node), op_lists.DATA_DEPENDENT_MODULES)


def _fresh_symbols(node: Node) -> list[str]:
    """Names of the symbols in the node's output sizes that stand for unknown data and occur in no input tensor's
    sizes.
    """
    if not any(isinstance(size, torch.SymInt) for tensor in tensors_of(node) for size in tensor.shape):
        return []
    known = {symbol for tensor in input_tensors_of(node) for symbol in free_unbacked_symbols(tensor)}
    found = {symbol for tensor in tensors_of(node) for symbol in free_unbacked_symbols(tensor)}
    return sorted(str(symbol) for symbol in found - known)
