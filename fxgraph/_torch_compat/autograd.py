"""What autograd's engine tells a running node, and version counters."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad, graph
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""``keep_graph() -> bool``, inside a backward: was it called with ``retain_graph=True``?"""


def plain_apply(node: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``node.apply`` without what ``Function.apply`` does for functorch, which looks at each argument twice in Python.

    Only where no functorch transform is active (``torch/autograd/function.py``).
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, node).apply  # type: ignore[misc]  # mypy: no instance
    return apply


SWITCH_GRAD_MODE = torch._C._set_grad_enabled
"""What Dynamo puts into a graph for ``torch.no_grad()`` and its like."""


def why_not_replay() -> str:
    """What is at work that has to see the ops themselves, which a replay does not show; empty where nothing is."""
    if forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation (torch.autograd.forward_ad) is on"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is at work around it"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode is on (torch.utils._python_dispatch), as inside of make_fx"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is at work around it"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # checkpoint's and save_on_cpu's give back what was saved
    if hooks is not None and getattr(hooks[0], "__module__", "") not in ("torch.utils.checkpoint", graph.__name__):
        return "hooks for saved tensors are on (torch.autograd.graph.saved_tensors_hooks), which may change them"
    return ""


_data = operator.attrgetter("data")


def aliases(tensors: Sequence[torch.Tensor]) -> map[torch.Tensor]:
    """A tensor for each that has its memory, no history, and a version counter of its own, which begins at 0.

    So is what an op gives. ``detach()`` shares the counter, and takes half as long again: it makes a view that
    forward-mode differentiation could follow.
    """
    return map(_data, tensors)


autocast_is_on = torch._C._is_any_autocast_enabled
"""``autocast_is_on() -> bool``, for any device."""


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of them, in a backward with ``is_grads_batched=True`` or inside of vmap."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def will_run(node: torch.autograd.graph.Node) -> bool:
    """Inside a backward: will the engine run this node, or was a gradient asked for that does not lead there?"""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "leaf node was passed" not in str(error):
            raise
        return True  # the gradient of this leaf is what torch.autograd.grad was asked for


def saves_tensors(node: torch.autograd.graph.Node) -> bool:
    """Whether a second backward through this node fails after one without ``retain_graph``.

    A generated node has ``_raw_saved_x`` for each tensor that it may have saved, and then ``_saved_x`` is not None; a
    list of tensors counts where it is empty too. What cannot be looked into is taken for one that saves: nodes written
    in Python, and those of C++ extensions.
    """
    if isinstance(node, torch._C._FunctionBase) or type(node).__name__ in ("CopySlices", "CppFunction"):
        return True
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                if getattr(node, name.removeprefix("_raw")) is not None:
                    return True
            except RuntimeError:  # changed in place since
                return True
    return False


def hooks_of_saved(ctx: Any) -> bool:
    """Whether what a ``torch.autograd.Function`` has saved, and autograd has not freed, has hooks."""
    return any(saved.unpack_hook is not None for saved in ctx._raw_saved_tensors)


def hooked(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one of these leaves has a hook that Python has registered: of its own, or of its ``AccumulateGrad``."""
    return _hooked_themselves(parameters) or any(map(_node_hooked, _with_node(parameters)))


def untouched(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether nothing in C++ holds one of these leaves, so that none has an ``AccumulateGrad``, and none has hooks."""
    return max(_holders(parameters), default=1) == 1 and not _hooked_themselves(parameters)


def watched(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether somebody may have to be told when one of these leaves gets a gradient.

    Beside hooks of Python's these are those of C++ (DistributedDataParallel's reducer), which nobody can see. But who
    registers one keeps the node, and it keeps the leaf; the reducer keeps the leaf itself too. A node that is kept by
    nothing but an old loss counts for one.
    """
    if untouched(parameters):
        return False
    return hooked(parameters) or max(_holders(parameters), default=0) > 2  # Python, and a node


def accumulated_elsewhere(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inside a backward: those of these leaves whose ``AccumulateGrad`` the engine will run."""
    return [p for p in _with_node(parameters) if will_run(_node_of(p))]


def _hooked_themselves(leaves: Sequence[torch.Tensor]) -> bool:
    return any([p._backward_hooks or p._post_accumulate_grad_hooks for p in leaves])  # noqa: C419  # quicker


def _with_node(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that may have a node: what nothing in C++ holds has none."""
    holders = _holders(leaves)
    return [] if max(holders, default=0) == 1 else [p for p, count in zip(leaves, holders, strict=True) if count > 1]


def _node_of(leaf: torch.Tensor) -> torch.autograd.graph.Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _holders(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each, how many hold it: all of Python counts as one."""
    return list(map(torch.Tensor._use_count, tensors))  # type: ignore[attr-defined]  # not in the stubs


def _node_hooked(leaf: torch.Tensor) -> bool:
    node = _node_of(leaf)
    # All hooks of a kind are in one dict, which a new one tells.
    handles = [node.register_hook(lambda *_: None), node.register_prehook(lambda *_: None)]
    found = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


def foreach_add_(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """``target.add_(value)`` for each pair, in few launches."""
    if targets:
        torch._foreach_add_(targets, values)


def saved_tensors_hooked() -> bool:
    """Whether saved-tensor hooks are on for everything, as inside of ``torch.utils.checkpoint``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def preserve_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In-place writes inside leave the tensors' version counters as they were. Inference tensors have none."""
    with _unsafe_preserve_version_counter(tuple([tensor for tensor in tensors if not tensor.is_inference()])):
        yield


class kernels_only:  # used as a function
    """No autograd, no inference mode and no autocast inside: aten ops, as a captured region runs them.

    Not made of ``torch.inference_mode(False)``, ``torch.no_grad()`` and a generator, which take three times as long.
    """

    __slots__ = ("_autocast", "_inference")

    def __enter__(self) -> None:
        self._autocast = torch._C._DisableAutocast()
        self._autocast.__enter__()
        self._inference = torch._C._InferenceMode(False)  # turns grad mode on, and on leaving puts it back too
        self._inference.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._inference.__exit__(*error)
        self._autocast.__exit__(*error)
