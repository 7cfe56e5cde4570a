"""Whether two things are alike for everything that comes after Dynamo: inputs, calls of a torch-level graph, torch's
state.

What cannot be accounted for is :class:`Unknown`, and like nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import fx

from passes.facts import name_of

from ._torch_compat.autocast import AutocastState
from ._torch_compat.autograd import saved_tensors_hooked


class Unknown(Exception):
    """Something of which cannot be said whether another one is the same."""


def state() -> Hashable:
    """What of torch's state tracing may look at.

    Raises:
        Unknown: while something of the user's looks on: hooks on saved tensors, a dispatch mode.
    """
    if saved_tensors_hooked() or torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        raise Unknown
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        AutocastState.now(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        *(torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        *(torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()),
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()),
        *(torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()),
    )


def is_torchs(node: fx.Node) -> bool:
    """Whether what a node calls is torch's or Python's own, without state."""
    target = node.target
    if node.op != "call_function":
        return True
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "prims")
    known = getattr(target, "__module__", None) or ""
    return name_of(node) is not None or known.partition(".")[0] in ("torch", "_operator", "builtins", "math")


PLAIN = (int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)
"""Types of constants in a graph that are what their text says."""

_STATIC = "_dynamo_static_input_type"  # Dynamo's mark on parameters; its others are about dynamic shapes


def looks(tensors: Sequence[torch.Tensor]) -> Hashable:
    """All of the tensors but their values, and which of them share memory.

    Raises:
        Unknown: for subclasses, other layouts and Dynamo's marks.
    """
    first_object: dict[int, int] = {}
    first_memory: dict[int, int] = {}
    found = []
    for i, tensor in enumerate(tensors):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise Unknown
        marks = {name: value for name, value in vars(tensor).items() if name.startswith("_dynamo")}
        if marks.keys() - {_STATIC}:
            raise Unknown
        memory = tensor.untyped_storage()
        base = tensor._base
        found.append(
            (
                *(type(tensor), tensor.dtype, tensor.device, tuple(tensor.size()), tensor.stride()),
                *(tensor.storage_offset(), memory.nbytes(), tensor.is_conj(), tensor.is_neg()),
                *(tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor._is_view()),
                None if base is None else (tuple(base.size()), base.stride(), base.requires_grad, base.is_leaf),
                str(marks.get(_STATIC)),
                first_object.setdefault(id(tensor), i),
                first_memory.setdefault(memory._cdata, i),
            )
        )
    return tuple(found)
