"""Inductor: what it decomposes, how it cuts a joint graph, and a graph compiled by it, with a look into its wrapper.

This rests on ``torch/_inductor/compile_fx.py`` (``compile_fx_inner``, and how ``compile_fx`` calls it) and on
``_functorch/partitioners.py``. Inductor's own settings hold, the user's changes included, but for :data:`_SETTINGS`.

Note [Random ops]

Draws are to be eager's: the same numbers, in the same order, at the same elements. So random ops are left to torch's
own kernels (``fallback_random``), are not decomposed, never run again in the backward, run in the order of the graph,
and get tensors with the strides that the graph says. ``bernoulli`` needs more: inductor runs it in place, and what
reads the result can be scheduled before it (torch 2.11 to 2.13, CPU: fusing loops of different shapes computes their
dependencies anew and forgets who writes in place). So it is called as a function, like the others.

Note [Inductor's wrapper]

What inductor makes of a graph is a Python function, its wrapper, that allocates buffers by ``empty_strided_cpu`` or
``empty_strided_cuda`` and calls generated kernels and operators, one after the other and without a branch. The wrapper
finds all of these as globals of its module. So a copy of the function over other globals (:meth:`CompiledGraph.hooked`)
lets an engine see each allocation and each call of a kernel. Where the wrapper is not of this form, there is no such
copy, and an engine calls the graph as it is.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from passes.effects import draws

from .attention import seeds
from .tracing import tracing

_SETTINGS: dict[str, Any] = {
    "fallback_random": True,  # random ops are eager's own: the same draws from the same generator
    "triton.cudagraphs": False,  # our engines capture
    "graph_partition": False,  # for torch's own CUDA graphs; without it the wrapper is one function
    "cpp_wrapper": False,
    "keep_output_stride": True,
    "bw_outputs_user_visible": True,
}


class CannotCompile(Exception):
    """Inductor gives up on a graph, or is not able to work here (no C++ compiler, no Triton). Says why."""


@contextlib.contextmanager
def _settings(**more: Any) -> Iterator[None]:
    from torch._inductor import config

    with config.patch({**_SETTINGS, **more}):
        yield


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What inductor wants decomposed while a graph is traced, but for random ops, whose draws are to stay eager's."""
    import torch._inductor.lowering  # noqa: F401  # which some decompositions use without importing it
    from torch._inductor.decomposition import select_decomp_table

    with _settings():
        table = select_decomp_table()
    return {op: how for op, how in table.items() if not draws(op) and op not in _KEPT}


_KEPT = {torch.ops.aten.empty_like.default}
"""Ops that inductor would rather have decomposed, but has kernels for: dropout draws into an ``empty_like``."""


def simplify(joint: fx.GraphModule) -> fx.GraphModule:
    """Inductor's rewrites of a joint graph, such as attention written by hand turned into one op.

    Patterns may take in random ops, which would draw otherwise then; a graph with some gets the plain rewrites only.

    Raises:
        CannotCompile: whatever inductor's passes raise.
    """
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    before = _strides_of_outputs(joint)
    random = any(draws(node.target) for node in joint.graph.nodes)
    # Without `fallback_random`, with which torch traces the patterns themselves anew in each process.
    how: dict[str, Any] = {"fallback_random": random, **({"pattern_matcher": False} if random else {})}
    with (
        tracing(),
        _quiet(),
        preserve_rng_state(),  # whether to pad a product is found by timing it, on random numbers
        V.set_fake_mode(_mode_of(values)),
        torch.no_grad(),
        torch._C._DisableAutocast(),  # its casts are in the graph; fake values made anew must not have more
        _settings(**how),
    ):
        device = values[0].device
        try:
            result: fx.GraphModule = _recursive_joint_graph_passes(
                joint, skip_invoke_subgraph=True, input_device=device
            )
        except Exception as error:  # passes and patterns of inductor's, which raise anything
            raise CannotCompile(f"{type(error).__name__}: {_reason(error)}") from error
        FakeTensorProp(result, _mode_of(values)).propagate_dont_convert_inputs(*values)
        _restore_strides_of_outputs(result, before)
        _read_before_written(result)
    return result


def _read_before_written(joint: fx.GraphModule) -> None:
    """Let what reads an input that is written at the end read a copy of it, which the partitioner has to save.

    The backward runs when the input has been written: what it computes again must not start from there. Where it does
    not need the copy, inductor removes it.
    """
    for node in _written(joint):
        readers = [user for user in node.users if not _writes(user, node)]
        if readers:
            with joint.graph.inserting_before(readers[0]):
                copied = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta = {"val": node.meta["val"].clone()}
            for user in readers:
                user.replace_input_with(node, copied)
    joint.graph.lint()
    joint.recompile()


def _written(joint: fx.GraphModule) -> list[fx.Node]:
    return [
        node for node in joint.graph.find_nodes(op="placeholder") if any(_writes(user, node) for user in node.users)
    ]


def _writes(user: fx.Node, node: fx.Node) -> bool:
    return user.target is torch.ops.aten.copy_.default and user.args[0] is node


def _strides_of_outputs(graph: fx.GraphModule) -> list[tuple[int, ...] | None]:
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in _outputs(graph)]
    return [tuple(value.stride()) if isinstance(value, torch.Tensor) else None for value in values]


def _restore_strides_of_outputs(graph: fx.GraphModule, wanted: list[tuple[int, ...] | None]) -> None:
    from torch._inductor.inductor_prims import force_stride_order

    outputs = list(_outputs(graph))
    for k, (strides, found) in enumerate(zip(wanted, _strides_of_outputs(graph), strict=True)):
        if strides is not None and found != strides:
            with graph.graph.inserting_before(graph.graph.output_node()):
                node = graph.graph.call_function(force_stride_order, (outputs[k], strides))
            node.meta["val"] = force_stride_order(outputs[k].meta["val"], strides)
            outputs[k] = node
    graph.graph.output_node().args = (tuple(outputs),)
    graph.recompile()


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]  # a tuple, as of every graph here


def partition(joint: fx.GraphModule, num_forward: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward with as little between them as recomputing cheap ops allows. Random ops never run again."""
    written = set(_written(joint))
    for node in joint.graph.nodes:
        if draws(node.target) or written.intersection(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with tracing(), _quiet(), torch._C._DisableAutocast():
        forward, backward = min_cut_rematerialization_partition(joint, [], num_fwd_outputs=num_forward)
    return forward, backward


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    groups: Sequence[Any],
    visible: Collection[int],
    backward: bool,
    aligned: Collection[int],
) -> tuple[CompiledGraph, list[tuple[int, ...]]]:
    """Compile a graph of ATen ops. It is not changed.

    Args:
        graph: takes and returns tensors only.
        inputs: tensors, real or fake, with the sizes, strides and dtypes of those that it will be called with.
        groups: for each input, then each output, something equal for those that share memory.
        visible: the outputs that have the strides that the graph says; others get what inductor finds best.
        backward: whether it is a backward.
        aligned: inputs that lie on multiples of 16 bytes whenever it is called.
    Returns:
        The compiled graph, and the strides of its outputs.
    Raises:
        CannotCompile: whatever inductor raises.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    own = copy.deepcopy(graph)
    random = [node.target for node in own.graph.nodes if draws(node.target)]
    _prepare(own)
    own.graph.output_node().meta["user_visible_output_idxs"] = sorted(visible)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # inductor's cache wants the ShapeEnv
    with mode:
        fakes = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
    with (
        tracing(),
        _quiet(),
        preserve_rng_state(),  # kernels may be chosen by running them, on random numbers
        torch._guards.tracing(TracingContext(mode)),
        _draws_as_in_eager(random),
    ):
        try:
            with TracingContext.report_output_strides() as strides:
                code = compile_fx_inner(
                    own,
                    fakes,
                    static_input_idxs=sorted(aligned),
                    cudagraphs=BoxedBool(False),
                    is_backward=backward,
                    is_inference=not backward and not random,
                )
        except Exception as error:  # inductor lets through whatever its lowerings, compilers and subprocesses raise
            raise CannotCompile(f"{type(error).__name__}: {_reason(error)}") from error
    found = []
    for k, node in enumerate(_outputs(graph)):
        known = strides[k] if strides is not None and k < len(strides) else None
        found.append(tuple(known) if known is not None else tuple(node.meta["val"].stride()))
    return CompiledGraph(code, len(inputs), tuple(groups), frozenset(visible), backward, seeds(graph)), found


def _mode_of(values: Sequence[Any]) -> FakeTensorMode:
    mode = detect_fake_mode(values)
    assert mode is not None, "the graph has no fake values"
    return mode


def _prepare(graph: fx.GraphModule) -> None:
    """Turn ``bernoulli_(empty_like(x))`` into a function that draws into the same elements; see Note [Random ops].

    Raises:
        CannotCompile: if something else is written in place that is no input, or an op is there that would not run as
            it is meant to.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.bernoulli_.float):
        value = node.args[0].meta["val"]  # the op's own value is that of the function that it was
        order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.size(dim)), reverse=True)
        if not value.permute(order).is_contiguous():
            raise CannotCompile("bernoulli_ fills a tensor that has gaps in memory")
        with graph.graph.inserting_before(node):
            how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            memory = graph.graph.call_function(aten.empty.memory_format, ([value.size(dim) for dim in order],), how)
            drawn = graph.graph.call_function(aten.bernoulli.p, (memory, *node.args[1:]))
            result = graph.graph.call_function(
                aten.permute.default, (drawn, [order.index(d) for d in range(len(order))])
            )
        result.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    for node in graph.graph.nodes:
        written = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if written and not (node.target is aten.copy_.default and node.args[0].op == "placeholder"):
            raise CannotCompile(f"{node.target} writes in place")
        if node.target is aten.mkldnn_rnn_layer.default:
            raise CannotCompile(f"{node.target} asks grad mode whether its backward will come")
        if node.target is aten.zeros.default:  # which is expected to be decomposed
            node.target, node.args = aten.full.default, (node.args[0], 0)
            node.kwargs = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
    graph.recompile()


def _chained() -> dict[str, Any]:
    """The setting with which each random op waits for the one before; empty where inductor does so itself (2.13)."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    if hasattr(post_grad, "_chain_random_ops_for_ordering"):
        return {}
    users: Any = config.post_grad_custom_post_pass

    class Chain(CustomGraphPass):  # in this place, for inductor's fake tensors do not go through what it makes
        def __call__(self, graph: fx.Graph) -> None:
            if users is not None:
                users(graph)
            drawing = [node for node in graph.nodes if draws(node.target)]
            after = {node: OrderedSet([before]) for before, node in itertools.pairwise(drawing)}
            preserve_node_ordering(graph, after)

        def uuid(self) -> Any:
            return "draws in order", None if users is None else users.uuid()

    return {"post_grad_custom_post_pass": Chain()}


@contextlib.contextmanager
def _draws_as_in_eager(ops: Sequence[Any]) -> Iterator[None]:
    """See Note [Random ops]."""
    from torch._inductor import decomposition, lowering

    order: dict[str, Any] = {"reorder_for_peak_memory": False, **_chained()} if len(ops) > 1 else {}
    strict = dict.fromkeys(
        [op for op in ops if op is not torch.ops.aten.bernoulli_.float], lowering.constrain_to_fx_strides
    )
    with (
        _settings(**order),
        mock.patch.dict(lowering._maybe_layout_constraints, strict),
        mock.patch.dict(decomposition.decompositions),  # inductor calls no op as it is that it could decompose
        mock.patch.dict(lowering.lowerings),
    ):
        lowering.lowerings.pop(torch.ops.aten.bernoulli.p, None)
        for op in (*ops, torch.ops.aten.bernoulli.p):
            decomposition.decompositions.pop(op, None)
            if op not in lowering.lowerings:
                # Inductor would do the same, but raises in an environment with CI set where there is a decomposition.
                lowering.make_fallback(op, warn=False)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inductor's advice (TF32, complex operators, online softmax) is for those who chose it themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"


class CompiledGraph:
    """A graph compiled by inductor: a function of tensors that returns a flat tuple of tensors.

    Outputs share memory with inputs and each other as the graph says, whatever inductor makes of it.
    """

    def __init__(
        self,
        code: Any,
        num_inputs: int,
        groups: tuple[Any, ...],
        visible: frozenset[int],
        backward: bool,
        seeds: tuple[int, ...] = (),
    ) -> None:
        self.seeds = seeds  # see attention.py
        self._code, self._num_inputs, self._groups, self._visible = code, num_inputs, groups, visible
        self._backward = backward

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._separate(inputs, self._code(list(inputs)))

    def hooked(
        self,
        allocating: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
        kernel: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> Callable[..., tuple[torch.Tensor, ...]] | None:
        """The same, with a function around each allocation and each generated kernel; see Note [Inductor's wrapper].

        Args:
            allocating: given the function that makes an empty tensor of size, strides and dtype, what to call instead.
            kernel: given a generated kernel, what to call instead. With it there is a result only where everything that
                the wrapper calls is known: allocations, kernels, operators.
        Returns:
            A function like this graph, or None where the wrapper is not of the known form.
        """
        wrapper = self._wrapper()
        if wrapper is None:
            return None
        names = {
            str(step.argval) for step in dis.get_instructions(wrapper) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
        names = {name for name in names if name in wrapper.__globals__}
        changed: dict[str, Any] = {}
        for name in names:
            value = wrapper.__globals__[name]
            if name in _ALLOCATIONS:
                changed[name] = allocating(value)
            elif kernel is not None and name.startswith("cpp_") and callable(value):
                changed[name] = kernel(value)
            elif kernel is not None and name not in _HARMLESS and not isinstance(value, torch.Tensor):
                return None
        copied = types.FunctionType(wrapper.__code__, {**wrapper.__globals__, **changed}, wrapper.__name__)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._separate(inputs, copied(list(inputs)))

        return run

    def _wrapper(self) -> types.FunctionType | None:
        function = getattr(self._code, "current_callable", None)
        if isinstance(function, types.FunctionType) and not function.__closure__:
            return function if "args" in function.__code__.co_varnames else None
        return None

    def _separate(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copies of outputs that share memory although the graph does not say so.

        Raises:
            CannotCompile: if visible outputs do not share memory although the graph says so.
        """
        group_of: dict[int, Any] = {}
        for tensor, group in zip(inputs, self._groups, strict=False):
            group_of.setdefault(tensor.untyped_storage()._cdata, group)
        separate: list[torch.Tensor] = []
        memory_of: dict[Any, int] = {}
        for k, (tensor, group) in enumerate(zip(outputs, self._groups[self._num_inputs :], strict=True)):
            memory = tensor.untyped_storage()._cdata
            if group_of.setdefault(memory, group) != group:
                tensor = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
                memory = tensor.untyped_storage()._cdata
            if k in self._visible and memory_of.setdefault(group, memory) != memory:
                raise CannotCompile("inductor gives memory of its own to an output that shares another one's")
            separate.append(tensor)
        return tuple(separate)


_ALLOCATIONS = ("empty_strided_cpu", "empty_strided_cuda")
_HARMLESS = {  # what a wrapper for the CPU uses beside kernels and allocations: dispatched operators, and no work
    *("torch", "aten", "inductor_ops", "_quantized", "extern_kernels"),
    *("assert_size_stride", "assert_alignment", "reinterpret_tensor", "device", "inf", "nan", "math"),
}


__all__ = ["CannotCompile", "CompiledGraph", "compile_graph", "decompositions", "partition", "simplify"]
