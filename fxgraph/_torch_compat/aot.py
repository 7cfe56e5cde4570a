"""AOTAutograd: joint graph export, its metadata, partition, and views made again outside of a graph.

``torch._functorch.aot_autograd.aot_export_joint_with_descriptors`` traces forward and backward into one aten graph
whose placeholders and outputs carry descriptors; ``_functorch/_aot_autograd/schemas.py`` describes the metadata;
``_functorch/partitioners.py`` cuts the joint graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.utils import clear_torch_function_mode_stack, set_torch_function_mode_stack
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors, schemas
from torch._functorch._aot_autograd.functional_utils import gen_alias_from_base
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import _extract_graph_with_inputs_outputs, default_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from . import inductor
from .fake_impls import as_kernels_do
from .functionalize import written_in_place
from .fx import code_later
from .product import both_formulas
from .tracing import forget_tensors, tracing

OutputType = schemas.OutputType
TangentAOTInput = descriptors.TangentAOTInput
EffectTokens = (descriptors.ForwardTokenAOTInput, descriptors.BackwardTokenAOTInput)
"""Inputs that AOTAutograd adds to keep ops with effects in order."""

# torch decomposes these in Python while tracing (py_impl on a composite or autograd key) into ops that eager does not
# run: other kernels, other rounding, other draws of the random generator. Without the Python entry the C++ kernel runs,
# as in eager. native_batch_norm is not among them: its Python entry gives the same kernel a schema that says what it
# writes, which functionalisation needs.
_DECOMPOSED = (
    "dropout",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "matmul",
    "cudnn_batch_norm",
    "hardshrink",
    "softshrink",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


_DRAWING = ("dropout", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Those of them that draw random numbers."""


@contextlib.contextmanager
def eager_kernels(names: Sequence[str] = _DECOMPOSED) -> Iterator[None]:
    """While tracing inside, composite ops decompose as eager's C++ does."""
    removed: list[tuple[Any, Any, Any]] = []
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    try:
        for op in [getattr(packet, name) for packet in packets for name in packet.overloads()]:
            for key in _KEYS:
                if key in op.py_kernels:
                    removed.append((op, key, op.py_kernels.pop(key)))
                    op._dispatch_cache.clear()
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


# Ops that write an argument without saying so in their schema: op -> (the written arguments, the argument that says
# whether it writes).
UNDECLARED_WRITES = {torch.ops.aten.cudnn_batch_norm.default: ((3, 4), 5)}


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    modes = torch.overrides._get_current_function_mode_stack()
    clear_torch_function_mode_stack()
    try:
        yield
    finally:
        set_torch_function_mode_stack(modes)


def export_joint(
    graph: torch.fx.GraphModule, inputs: tuple[Any, ...], for_inductor: bool = False
) -> tuple[torch.fx.GraphModule, Any]:
    """Joint forward/backward aten graph of a torch-level graph on these inputs, and its ``ViewAndMutationMeta``.

    The inputs may be real tensors: only their metadata is used. Without an input that requires grad, or under
    ``no_grad``, the graph has the forward alone. Mutations that autograd need not see are ``copy_`` nodes in the graph.
    The ops are those that eager runs, or with ``for_inductor`` what inductor wants them decomposed into.
    """
    with (
        tracing(),
        _without_function_modes(),  # they have had their say when the torch-level graph was made
        contextlib.ExitStack() as stack,
        eager_kernels(_DRAWING if for_inductor else _DECOMPOSED),
        written_in_place(),
        contextlib.nullcontext() if for_inductor else both_formulas(graph),
        as_kernels_do(),
        # A backward runs after the autocast context; one inside of it is run as eager's (fxgraph/replay.py).
        functorch_config.patch(functionalize_rng_ops=False, backward_pass_autocast="off"),
        torch._guards.tracing(None),
        code_later(),
    ):
        joint = aot_export_joint_with_descriptors(
            stack,
            graph,
            inputs,
            keep_inference_input_mutations=True,
            decompositions=inductor.decompositions() if for_inductor else None,
        )
        forget_tensors(joint._aot_state.flat_args)
        return joint.graph_module, joint._aot_state.fw_metadata


def counted_writes(graph: torch.fx.GraphModule, inputs: tuple[Any, ...]) -> frozenset[int]:
    """The inputs of a torch-level graph whose version counters it moves, tried on fake tensors.

    Batch norm writes its running statistics without counting, which no decomposition of it tells any more.
    """
    with (
        tracing(),
        _without_function_modes(),
        torch.inference_mode(False),  # whose tensors have no version
        torch.no_grad(),  # nothing is saved, which a checkpoint around the call would count
        FakeTensorMode(),
    ):
        fakes = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        before = [fake._version for fake in fakes]
        graph.forward(*fakes)
        return frozenset(i for i, fake in enumerate(fakes) if fake._version != before[i])


def partition(
    joint: torch.fx.GraphModule, num_forward: int, for_inductor: bool = False
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward graph (its last outputs are the saved values) and backward graph (saved values, then tangents)."""
    _use_a_result_of_each(joint.graph)
    with code_later():
        if for_inductor:
            return inductor.partition(joint, num_forward)
        return default_partition(joint, [], num_fwd_outputs=num_forward, static_lifetime_input_indices=[])


def _use_a_result_of_each(graph: torch.fx.Graph) -> None:
    """An op with several results of which none is used (a dropout for its draws alone) gets a user.

    The partitioner tells such ops by their ``getitem`` users, and takes one without any for an op that gives no tensor.
    """
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(value, (tuple, list)) and len(value):
            with graph.inserting_after(node):
                first = graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": value[0]}


def extract(
    joint: torch.fx.GraphModule, inputs: list[torch.fx.Node], outputs: list[torch.fx.Node | None]
) -> torch.fx.GraphModule:
    """The part of a graph between some nodes.

    Raises:
        AssertionError: (torch's own) if an output needs a placeholder that is not among the inputs.
    """
    descs = [None] * len(outputs)
    graph = _extract_graph_with_inputs_outputs(joint.graph, inputs, outputs, descs, "backward")  # type: ignore[arg-type]
    return torch.fx.GraphModule(joint, graph)


def view_again(base: torch.Tensor, like: torch.Tensor, requires_grad: bool, view_metas: Any) -> torch.Tensor:
    """The view of ``base`` that the traced program returned, made by autograd-visible view ops."""
    return gen_alias_from_base(base, like, requires_grad, view_metas, replay_views=True)


__all__ = [
    "EffectTokens",
    "OutputType",
    "TangentAOTInput",
    "counted_writes",
    "eager_kernels",
    "export_joint",
    "extract",
    "partition",
    "view_again",
]
