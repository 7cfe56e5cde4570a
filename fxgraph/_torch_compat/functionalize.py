"""AOTAutograd's functionalisation: what is written in place keeps its strides.

``FunctionalTensorMode`` of ``torch._subclasses.functional_tensor`` replaces an op that writes by one that gives a new
value. Some of them give it in other strides than those of the tensor that eager writes: ``x.baddbmm_`` of a transposed
``x`` becomes contiguous, and so does what is made of it, up to the outputs. The mode's wrappers still know eager's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def written_in_place() -> Iterator[None]:
    """While tracing inside, the new value of a tensor that an op has written has the strides of the tensor."""
    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = original(mode, func, types, args, kwargs)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and _INPLACE_VIEW not in func.tags:
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | (kwargs or {})
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in pytree.tree_leaves(given.get(argument.name)):
                        if isinstance(tensor, FunctionalTensor):
                            _lay_out(tensor)
        return result

    mode: Any = FunctionalTensorMode
    mode.__torch_dispatch__ = dispatch
    try:
        yield
    finally:
        mode.__torch_dispatch__ = original


_INPLACE_VIEW = torch.Tag.inplace_view  # ops that change sizes and strides, ``transpose_``: the new ones are eager's


def _lay_out(tensor: FunctionalTensor) -> None:
    value = torch._from_functional_tensor(tensor.elem)
    if tensor.layout is not torch.strided or value.size() != tensor.size() or not value.numel():
        return
    pairs = zip(value.size(), value.stride(), tensor.stride(), strict=True)
    if any(size > 1 and own != eager for size, own, eager in pairs):
        memory = value.new_empty_strided(value.size(), tensor.stride())
        tensor.replace_(torch.ops.aten.copy.default(memory, value))
        tensor.commit_update()
        tensor.sync()
