"""Values of two runs, compared: bit by bit, or with a tolerance where eager itself is not repeatable."""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

TOLERANCE = "torch.testing.assert_close's default for the dtype"
"""The tolerance where eager run twice differs from itself: what remains then is another order of additions (atomics on
CUDA), whose size those defaults are made for."""


class Strictness(enum.Enum):
    """How values are compared; shapes, dtypes, strides and flags always are."""

    BITS = "bit by bit, any NaN like any other"
    EQUAL = "equal: zeros may differ in sign"
    CLOSE = TOLERANCE
    SHAPES = "not at all"


def copy_of(tree: Any) -> Any:
    """The same values in memory of their own: strides, overlaps, shared memory and ``requires_grad`` are kept."""
    leaves, spec = pytree.tree_flatten(tree)
    detached: dict[int, torch.Tensor] = {
        id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)
    }  # by identity, so that a tensor that comes twice stays one tensor
    copies = copy.deepcopy(detached)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            copies[id(leaf)].requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], spec)


def same_values(one: torch.Tensor, other: torch.Tensor, *, signs_of_zeros: bool) -> bool:
    """Equal element by element, any NaN like any other."""
    if one.is_complex():
        parts = [torch.view_as_real(t.resolve_conj().resolve_neg()) for t in (one, other)]
        return same_values(*parts, signs_of_zeros=signs_of_zeros)
    if not one.is_floating_point():
        return torch.equal(one, other)
    equal = one == other
    if signs_of_zeros:
        equal &= one.signbit() == other.signbit()
    return bool((equal | (one.isnan() & other.isnan())).all())


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that say where an element lies: none of dimensions of size 1 or of tensors without elements.

    An expanded tensor counts as contiguous: a result in memory of its own need not repeat eager's trick.
    """
    if not tensor.numel():
        return ()
    strides = tensor.contiguous().stride() if 0 in tensor.stride() else tensor.stride()
    return tuple(stride for size, stride in zip(tensor.size(), strides, strict=True) if size > 1)


def tensor_difference(found: torch.Tensor, expected: torch.Tensor, strictness: Strictness) -> str | None:
    """What differs first (None: nothing): kind of tensor, dtype, shape, requires_grad, values, strides."""
    for name in ("layout", "dtype", "device", "shape", "requires_grad"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} {getattr(found, name)}, eager {getattr(expected, name)}"
    if expected.layout != torch.strided:
        found, expected = found.detach().to_dense(), expected.detach().to_dense()
    one, other = found.detach(), expected.detach()
    if one.is_quantized:
        one, other = one.dequantize(), other.dequantize()
    if strictness in (Strictness.BITS, Strictness.EQUAL):
        if not same_values(one, other, signs_of_zeros=strictness is Strictness.BITS):
            return "values" + _largest_gap(one, other)
    elif strictness is Strictness.CLOSE:
        try:
            torch.testing.assert_close(one, other, equal_nan=True)
        except AssertionError:
            return "values beyond tolerance" + _largest_gap(one, other)
    if significant_strides(found) != significant_strides(expected):
        return f"strides {found.stride()}, eager {expected.stride()}"
    return None


def _largest_gap(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype == torch.bool or not one.numel():
        return ""
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs()
    finite = gap[gap.isfinite()]
    largest = f"{finite.max().item():.3g}" if finite.numel() else "none finite"
    return f", largest difference {largest}, {int((gap != 0).sum())} of {gap.numel()} elements"


def difference(found: Any, expected: Any, what: str, strictness: Strictness) -> str | None:
    """Where two trees of tensors and constants differ first, in words; None where they are the same."""
    found_leaves, found_spec = pytree.tree_flatten(found)
    leaves, spec = pytree.tree_flatten(expected)
    if found_spec != spec:
        return f"{what}: structure {found_spec}, eager {spec}"[:300]
    for i, (one, other) in enumerate(zip(found_leaves, leaves, strict=True)):
        place = f"{what} {i}" if len(leaves) > 1 else what
        if isinstance(other, torch.Tensor) != isinstance(one, torch.Tensor):
            return f"{place}: {type(one).__name__}, eager {type(other).__name__}"
        if isinstance(other, torch.Tensor):
            gap = tensor_difference(one, other, strictness)
            if gap is not None:
                return f"{place}: {gap}"
        elif type(one) is not type(other) or not _same_constant(one, other, strictness):
            return f"{place}: {one!r}, eager {other!r}"[:300]
    return None


def _same_constant(one: Any, other: Any, strictness: Strictness) -> bool:
    if strictness is Strictness.SHAPES or bool(one == other):
        return True
    if not isinstance(one, (float, complex)):
        return False
    kind = Strictness.CLOSE if strictness is Strictness.CLOSE else Strictness.EQUAL
    return tensor_difference(torch.tensor(one), torch.tensor(other), kind) is None
