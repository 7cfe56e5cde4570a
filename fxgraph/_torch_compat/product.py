"""The gradient of ``prod``, for which torch has two formulas.

Eager looks whether the input has zeros, and divides by it if there are none. While torch traces it cannot look, and
takes the other formula always, which rounds otherwise. Here both are traced, and the data decides between them at each
replay. ``prod_backward`` in ``torch/csrc/autograd/FunctionsManual.cpp`` is the original.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_OPS = (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int)
_KEY = torch._C.DispatchKey.Autograd


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, x: torch.Tensor, dim: tuple[Any, ...], dtype: torch.dtype | None) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = op(x, *dim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, result = ctx.saved_tensors
        x = x.to(grad.dtype)
        if not x.dim():
            chosen = grad.clone()
        elif ctx.dim:
            dim, keepdim = ctx.dim
            if not keepdim:
                grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
            quotient = grad * (result / x).conj()
            chosen = torch.where((x == 0).sum() == 0, quotient, _without_division(grad, x, dim))
        else:
            zeros = (x == 0).sum()
            quotient = grad * (result / x).conj()
            flat = _without_division(grad, x.contiguous().view(-1), 0).view_as(x)
            chosen = torch.where(zeros == 0, quotient, torch.where(zeros > 1, torch.zeros_like(x), flat))
        return None, chosen, None, None


def _without_division(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element the product of those before it and those after it."""
    size = x.size(dim)
    if size <= 1:
        return grad.expand_as(x)
    ones = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * after).conj()


def _kernel(op: Any) -> Any:
    apply: Any = _Product.apply

    def product(x: torch.Tensor, *dim: Any, dtype: torch.dtype | None = None, keepdim: bool = False) -> Any:
        given = (*dim, keepdim)[:2] if dim else ()
        if x.requires_grad and torch.is_grad_enabled():
            return apply(op, x, given, dtype)
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, *given, dtype=dtype)

    return product


def _transforms(graph: torch.fx.GraphModule) -> bool:
    """Whether a torch-level graph has something of ``torch.func``, which cannot go through :class:`_Product`."""
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return any(str(getattr(target, "__module__", "")).startswith("torch._functorch") for target in targets)


@contextlib.contextmanager
def both_formulas(graph: torch.fx.GraphModule) -> Iterator[None]:
    """While this graph is traced inside, the gradient of ``prod`` is eager's."""
    if _transforms(graph):
        yield
        return
    for op in _OPS:
        op.py_kernels[_KEY] = _kernel(op)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in _OPS:
            del op.py_kernels[_KEY]
            op._dispatch_cache.clear()
