"""Plans shared by callables that are alike: twelve equal blocks are lowered once.

Note [When a plan is shared]

Dynamo reads each callable by itself, for its guards are its own. What comes after (AOTAutograd, the rules, the plan)
follows from the torch-level graph, from what is to be seen of its inputs, and from the state of torch. So within one
call of ``make_graphed_callables``, in which no code of the user's runs between one callable and the next, a plan serves
every graph that has the same :func:`key_of`. The key is an account of everything that tracing may look at; a graph or
an input of which that cannot be said has none, and is planned by itself. A plan is data: it holds no memory of
anybody's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from passes.facts import name_of

from ._torch_compat.autocast import AutocastState
from ._torch_compat.autograd import saved_tensors_hooked
from .plan import Plan
from .trace import InputSpec


class Plans:
    """The plans that the callables of one ``make_graphed_callables`` share."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Plan] = {}

    def find(self, key: Hashable | None) -> Plan | None:
        """The plan for a key, if one has been kept."""
        return None if key is None else self._known.get(key)

    def keep(self, key: Hashable | None, plan: Plan) -> None:
        """Have the plan found by its key."""
        if key is not None:
            self._known[key] = plan


def key_of(
    graph: fx.GraphModule, specs: Sequence[InputSpec], tensors: Sequence[torch.Tensor], for_inductor: bool = False
) -> Hashable | None:
    """What two torch-level graphs must have in common to have the same plan; None where that cannot be said.

    Args:
        graph: all of its inputs are tensors.
        specs: what they are.
        tensors: the inputs.
        for_inductor: whether the plan is of the ops that inductor wants to be given.
    """
    try:
        return for_inductor, _state(), tuple(specs), _nodes(graph.graph), _looks(tensors)
    except _Unknown:
        return None


class _Unknown(Exception):
    """Something of which cannot be said whether another one is the same."""


def _state() -> Hashable:
    if saved_tensors_hooked() or torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        raise _Unknown
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


def _nodes(graph: fx.Graph) -> Hashable:
    place: dict[fx.Node, int] = {}
    found = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output") or not _is_torchs(node):
            raise _Unknown
        # With the name, which leads from an op of the plan back to the node, and the user's line, for messages.
        args = _frozen(node.args, place), _frozen(node.kwargs, place)
        found.append((node.op, node.target, node.name, node.stack_trace, *args))
        place[node] = len(place)
    return tuple(found)


def _is_torchs(node: fx.Node) -> bool:
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


_PLAIN = (int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)


def _frozen(value: Any, place: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return "node", place[value]
    if type(value) in _PLAIN or isinstance(value, torch.memory_format):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, and so are 1, 1.0 and True
    if isinstance(value, slice):
        return slice, _frozen((value.start, value.stop, value.step), place)
    if isinstance(value, (tuple, list)):  # FX has lists and tuples of its own
        return isinstance(value, tuple), tuple([_frozen(one, place) for one in value])
    if isinstance(value, dict):
        return dict, tuple([(_frozen(name, place), _frozen(one, place)) for name, one in value.items()])
    raise _Unknown


_STATIC = "_dynamo_static_input_type"  # Dynamo's mark on parameters; its others are about dynamic shapes


def _looks(tensors: Sequence[torch.Tensor]) -> Hashable:
    """All of the tensors but their values, and which of them share memory."""
    first_object: dict[int, int] = {}
    first_memory: dict[int, int] = {}
    found = []
    for i, tensor in enumerate(tensors):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise _Unknown
        marks = {name: value for name, value in vars(tensor).items() if name.startswith("_dynamo")}
        if marks.keys() - {_STATIC}:
            raise _Unknown
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
