"""What an op of a torch-level graph writes and draws, found by running it on the tracer's fake values.

A function of torch's may do several ATen ops, and neither its name nor its signature says what they write:
``F.embedding`` with ``max_norm`` renormalises rows of the weight, ``torch.batch_norm`` writes its fourth and fifth
argument, ``F.fractional_max_pool2d`` draws. Run on fakes, each ATen op passes a dispatch mode, and its schema and tags
tell. Nothing is computed, and no generator moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .effects import PURE_NAMESPACES, draws, reshapes, written_arguments
from .facts import tensors_of, value_of


@dataclass
class Observed:
    """What the ATen ops of a call did.

    Attributes:
        written: storages of the call's inputs that were written, as the tracer's fakes have them.
        reshaped: those of the inputs whose sizes, strides or storage were changed in place, likewise.
        draws: whether one of the ops may draw random numbers.
    """

    written: set[int] = field(default_factory=set)
    reshaped: set[int] = field(default_factory=set)
    draws: bool = False


def observe(node: Node) -> Observed | None:
    """Run the call of ``node`` on fakes of its values and return what it did; None where it cannot be run so.

    Only functions and methods of torch's and of Python's operators are run, and custom operators; other functions could
    do anything beside. So could those that neither take nor give a tensor, such as switches of modes. What depends on
    data has no fake result.
    """
    if not _is_known(node) or not any(map(tensors_of, (node, *node.all_input_nodes))):
        return None
    given = pytree.tree_map_only(Node, value_of, (node.args, node.kwargs))
    if any(isinstance(leaf, Node) and value_of(leaf) is None for leaf in pytree.tree_leaves((node.args, node.kwargs))):
        return None
    mode, watch = FakeTensorMode(), _Watch()
    bases: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in bases:
            base = bases[memory._cdata] = torch.empty(memory.nbytes(), dtype=torch.uint8, device=tensor.device)
            watch.storages[base.untyped_storage()._cdata] = memory._cdata
        place = (bases[memory._cdata].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)

    try:
        with torch.no_grad(), mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, own, given)
            with watch:
                if node.op == "call_method":
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is callable
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return None  # what ops raise that need data, or symbols (an AssertionError), which these fakes do not have
    return watch.observed


def _is_known(node: Node) -> bool:
    if node.op == "call_method":
        return True
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return True
    module = getattr(node.target, "__module__", None)
    if module is None:  # of a method of tensors, which is bound to C++
        return True
    return str(module).partition(".")[0] in ("torch", "operator", "_operator", "builtins", "math")


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.observed = Observed()
        self.storages: dict[int, int] = {}  # those of the fakes that the call is given -> the tracer's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            self.observed.draws |= draws(func) or func.namespace not in (*PURE_NAMESPACES, "prim")
            if reshapes(func):
                self.observed.reshaped.update(self._known(args))
            declared = func._schema.arguments
            given = dict(zip([a.name for a in declared if not a.kwarg_only], args, strict=False)) | kwargs
            defaults = {a.name: a.default_value for a in declared}
            for name in written_arguments(func, lambda name: given.get(name, defaults.get(name))):
                self.observed.written.update(self._known(given.get(name)))
        return func(*args, **kwargs)

    def _known(self, values: Any) -> list[int]:
        """The tracer's storages among those of values."""
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        return [self.storages[storage] for storage in storages if storage in self.storages]
