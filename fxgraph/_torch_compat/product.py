"""The gradients of ``prod`` and ``cumprod``, for which torch has several formulas.

Eager looks whether the input has zeros, and divides by it if there are none. While torch traces it cannot look, and
takes another formula always, which rounds otherwise. Here eager's are traced, and the data decides between them at each
replay. ``prod_backward`` and ``cumprod_backward`` in torch, ``FunctionsManual.cpp`` and ``ReduceOps.cpp``, are the
originals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_KEY = torch._C.DispatchKey.Autograd


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, x: torch.Tensor, dim: tuple[Any, ...], dtype: torch.dtype | None) -> torch.Tensor:
        result: torch.Tensor = _below_autograd(op, x, *dim, dtype=dtype)
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


class _CumulativeProduct(_Product):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, result = ctx.saved_tensors
        (dim,), grad = ctx.dim, grad.to(x.dtype)
        if x.numel() <= 1 or x.size(dim) == 1:
            return None, grad.clone(), None, None
        x, result, zeros = x.conj(), result.conj(), x == 0
        weighted = result * grad
        quotient = _sums_from(weighted, dim) / x
        # Of a slice with zeros only what comes before the first one, and the first one itself, have a gradient.
        count = zeros.cumsum(dim)
        before = count == 0
        between = count == 1
        index = between.max(dim, keepdim=True).indices
        first = torch.zeros_like(between).scatter(dim, index, 1).logical_and(between)
        left = result.gather(dim, (index - 1).relu()).masked_fill(index == 0, 1.0)
        right = x.masked_fill(~(between & ~first), 1.0).cumprod(dim) * grad.masked_fill(~between, 0.0)
        at_first = right.sum(dim, keepdim=True) * left
        until_first = _sums_from(weighted.masked_fill(~before, 0.0), dim) / x
        some = torch.where(first, at_first, torch.where(before, until_first, torch.zeros_like(until_first)))
        return None, torch.where(zeros.any(), some, quotient), None, None


def _sums_from(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element its sum with all that come after it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _below_autograd(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def _product(op: Any) -> Any:
    apply: Any = _Product.apply

    def product(x: torch.Tensor, *dim: Any, dtype: torch.dtype | None = None, keepdim: bool = False) -> Any:
        given = (*dim, keepdim)[:2] if dim else ()
        if x.requires_grad and torch.is_grad_enabled():
            return apply(op, x, given, dtype)
        return _below_autograd(op, x, *given, dtype=dtype)

    return product


def _cumulative_product(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        apply: Any = _CumulativeProduct.apply
        result: torch.Tensor = apply(torch.ops.aten.cumprod.default, x, (dim,), dtype)
        return result
    result = _below_autograd(torch.ops.aten.cumprod.default, x, dim, dtype=dtype)
    return result


def _cumulative_product_(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return x.copy_(_cumulative_product(x.clone(), dim, dtype=dtype))  # what has been saved does not change
    result: torch.Tensor = _below_autograd(torch.ops.aten.cumprod_.default, x, dim, dtype=dtype)
    return result


_KERNELS: dict[Any, Any] = {
    **{op: _product(op) for op in (torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int)},
    torch.ops.aten.cumprod.default: _cumulative_product,
    torch.ops.aten.cumprod_.default: _cumulative_product_,
}


def _transforms(graph: torch.fx.GraphModule) -> bool:
    """Whether a torch-level graph has something of ``torch.func``, which cannot go through :class:`_Product`."""
    modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return any(str(getattr(target, "__module__", "")).startswith("torch._functorch") for target in targets)


@contextlib.contextmanager
def both_formulas(graph: torch.fx.GraphModule) -> Iterator[None]:
    """While this graph is traced inside, the gradients of ``prod`` and ``cumprod`` are eager's."""
    if _transforms(graph):
        yield
        return
    for op, kernel in _KERNELS.items():
        op.py_kernels[_KEY] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in _KERNELS:
            del op.py_kernels[_KEY]
            op._dispatch_cache.clear()
