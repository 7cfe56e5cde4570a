"""Host scalars and small host tensors moved to the device of a graph.

One 0-dim CPU tensor among the tensors of a GPU graph is enough for ``torch.compile(backend="cudagraphs")`` to leave the
whole graph eager, and for the rule `SeveralDevices` to refuse it. torch's own remedy, ``move_constructors_to_gpu`` in
``torch/_inductor/fx_passes/post_grad.py``, moves constructors only and may change half-precision results.

Note [Host scalars as numbers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A 0-dim CPU tensor next to a GPU tensor reaches the kernel as a number of the precision that the kernel computes in.
The same value as a 0-dim GPU tensor is first rounded to the common dtype: for float16 that gives other bits. A Python
number reaches the kernel as the CPU tensor does, so a number it is, wherever the result keeps its dtype (in type
promotion a number weighs less than a 0-dim tensor).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from .base import Pass
from .capturable_tensors import home_device
from .constraint import Constraint
from .effects import Effects, is_pure, is_uninitialised
from .facts import constant_of, schema_argument, value_of
from .lower import free_name
from .masks import fills_with_number
from .verify import AtenLevel, HasFakeValues

aten = torch.ops.aten

# Elementwise operators that take a number where they take a 0-dim tensor, with the same result.
_TAKES_NUMBER = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode})
_TAKES_NUMBER_IN_PLACE = frozenset({aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor})
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
    | {aten._unsafe_index_put.default}
)
_PUTS = {aten.index_put.default: aten.masked_fill.Scalar, aten.index_put_.default: aten.masked_fill_.Scalar}
_MOVES = frozenset({aten._to_copy.default, aten.to.device, aten.to.dtype_layout, torch.ops.prims.device_put.default})
_LITERALS = frozenset({aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default, aten.clone.default})
_COMPARISONS = {getattr(aten, name).Tensor: getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_FILLS = {
    aten.masked_fill.Tensor: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill_.Scalar,
}
_WRITES = frozenset({aten.fill.Tensor, aten.copy.default})  # what `x[0] = 1` comes down to
_COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})
_FEW = 4096  # elements of a constant that is computed when the graph is rewritten
_CPU = torch.device("cpu")
_FILLED = frozenset({aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default})


@dataclass(frozen=True)
class MoveConstantsToDevice(Pass):
    """Take constants that live on the CPU out of a graph whose tensors live on another device.

    What counts as a constant: ``full``, ``zeros``, ``ones``, ``scalar_tensor`` and whole-numbered ``arange`` on the
    CPU, literals (``lift_fresh_copy`` of an attribute, as ``torch.tensor(2.0)`` is traced), the attributes that are
    listed, and what pure operators make of these on the CPU, which is computed now, by the same kernels. Five uses of
    one are rewritten, the only ones whose bits are sure to stay:

    * a 0-dim one as operand of ``add``, ``sub``, ``mul``, ``div`` or a comparison with a device tensor, or as the value
      of ``masked_fill``, ``fill`` or ``copy``, becomes a Python number where the result's dtype stays; see Note
      [Host scalars as numbers];
    * a 0-dim one that ``index_put`` writes where a boolean mask is true becomes the number of a ``masked_fill``;
    * a 0-dim one in ``where``, which copies it to the device itself, is made there or becomes an attribute there;
    * a constructor that is an index of device memory, or is copied to the device, is made on the device;
    * a literal that is copied to the device becomes an attribute on the device, copied once, now.

    A graph whose tensors are all on one device is left as it is. Nodes that become unused stay: see `RemoveDeadCode`.

    Attributes:
        attributes: names of attributes whose values never change, such as a table; others are state that may.

    Raises:
        TypeError: if ``attributes`` is no tuple or list of names.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given: object = self.attributes
        if not isinstance(given, (tuple, list)) or not all(isinstance(name, str) for name in given):
            raise TypeError(f"MoveConstantsToDevice takes a tuple of names, such as ('table',), not {given!r}")
        object.__setattr__(self, "attributes", tuple(given))

    def rewrite(self, gm: GraphModule) -> bool:
        """Rewrite the uses and return whether there were any."""
        home = home_device(gm.graph)
        if home is None:
            return False
        effects = Effects.of(gm)
        changed = False
        known: dict[Node, torch.Tensor] = {}
        for node in list(gm.graph.nodes):
            if not isinstance(value_of(node), FakeTensor) or not _is_on(node, _CPU) or effects.is_written(node):
                continue
            literal = self._literal(node, effects)
            if literal is None:
                literal = _computed(node, known)
            if literal is not None:
                known[node] = literal
            if literal is not None and _is_constructor(node):
                literal = None  # made on the device again, rather than copied
            if literal is None and not _is_constructor(node):
                continue
            number = _number(node, literal)
            for user in list(node.users):
                changed |= _move(node, user, home, literal, number, effects)
        return changed

    def _literal(self, node: Node, effects: Effects) -> torch.Tensor | None:
        """The real tensor behind a literal or a listed attribute; None for anything else."""
        lifted, current = False, node
        while current.target in _LITERALS and isinstance(current.args[0], Node):
            lifted |= current.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default)
            current = current.args[0]
        if current.op != "get_attr" or not (lifted or str(current.target) in self.attributes):
            return None
        value = constant_of(current)
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
        return value if is_real and not effects.is_written(current) else None


def _computed(node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    """What a pure operator gives for constants that are known."""
    value = value_of(node)
    if not isinstance(node.target, OpOverload) or not is_pure(node) or is_uninitialised(node):
        return None
    if any(source not in known for source in node.all_input_nodes):
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > _FEW or value.requires_grad:
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
    with torch.no_grad(), disable_proxy_modes_tracing(), unset_fake_temporarily():
        made: torch.Tensor = node.target(*args, **kwargs)
    return made


def _move(
    node: Node, user: Node, home: torch.device, literal: torch.Tensor | None, number: Any, effects: Effects
) -> bool:
    """Rewrite one use of a constant, if it is one of those that can be; return whether it was."""
    if number is not None and user.target in _PUTS and user.args[2] is node and fills_with_number(user):
        return _fill_masked(user, number)
    if number is not None and _takes_number(user, node, number, home):
        _give_number(user, node, number)
        return True
    if user.target is aten.where.self and value_of(node).dim() == 0 and user.args[0] is not node:
        if literal is not None:
            new = _as_attribute(user, literal, is_copied=False, like=_fake_on(value_of(node), home, literal.dtype))
        else:
            new = _on_device(node, home, value_of(node).dtype)
        user.replace_input_with(node, new)
        return True
    is_index = user.target in _INDEXING and user.args[0] is not node and _is_on(user.args[0], home)
    if literal is None and is_index:
        user.replace_input_with(node, _on_device(node, home, value_of(node).dtype))
        return True
    if not _is_plain_move(user, home):
        return False
    if literal is not None:
        new = _as_attribute(user, literal, is_copied=effects.is_written(user) or effects.escapes(user))
    else:
        new = _on_device(node, home, value_of(user).dtype)
    user.replace_all_uses_with(new)
    user.graph.erase_node(user)
    return True


def _fill_masked(user: Node, number: Any) -> bool:
    """Write a number by a mask as the kernels do in the end; return whether the result keeps its strides."""
    written: Any = user.args[0]
    places: Any = user.args[1]
    target: Any = user.target
    (mask,) = (one for one in places if one is not None)
    shape, fill = value_of(mask), _PUTS[target]
    behind = value_of(written).dim() - (len(places) - 1 + shape.dim())
    shapes = [shape]
    with shape.fake_mode:
        for _ in range(behind):
            shapes.append(aten.unsqueeze.default(shapes[-1], -1))
        filled = aten.masked_fill.Scalar(value_of(written), shapes[-1], number)
    if fill is aten.masked_fill.Scalar and filled.stride() != value_of(user).stride():
        return False
    for shape in shapes[1:]:
        with user.graph.inserting_before(user):
            mask = user.graph.call_function(aten.unsqueeze.default, (mask, -1))
        mask.meta = {**user.meta, "val": shape}
    user.target, user.args, user.kwargs = fill, (written, mask, number), {}
    return True


def _is_constructor(node: Node) -> bool:
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return not value_of(node).is_floating_point()  # the last bits of others depend on the device
    return node.target in _FILLED


def _number(node: Node, literal: torch.Tensor | None) -> Any:
    """The value of a 0-dim constant as a Python number, None for anything else."""
    if value_of(node).dim():
        return None
    if literal is not None:
        return literal.item()
    filled = {aten.zeros.default: 0, aten.ones.default: 1}
    number: Any = filled[node.target] if node.target in filled else node.args[-1]
    is_known = node.target in _FILLED and isinstance(number, (bool, int, float, complex))
    return torch.full((), number, dtype=value_of(node).dtype).item() if is_known else None


def _takes_number(user: Node, node: Node, number: Any, home: torch.device) -> bool:
    """Whether ``user`` computes the same with ``number`` in the place of ``node``."""
    places = [place for place, argument in enumerate(user.args) if argument is node]
    if user.target in _FILLS:
        return places == [2] and _is_on(user.args[0], home)
    if user.target in _WRITES:
        filled = user.args[0]
        if places != [1] or not isinstance(filled, Node) or not _is_on(filled, home):
            return False
        if user.target is aten.fill.Tensor:  # which fills with the number, if its tensor is on another device
            return True
        like = value_of(filled)
        same_strides = value_of(user).stride() == torch.empty_like(like, device="meta").stride()
        return same_strides and _fits(number, value_of(node).dtype, like.dtype)
    if user.target not in _TAKES_NUMBER | _TAKES_NUMBER_IN_PLACE | _COMPARISONS.keys():
        return False
    if places == [0] and user.target in _COMMUTE and not user.kwargs:
        other = user.args[1]
    elif places == [1]:
        other = user.args[0]
    else:
        return False
    if not isinstance(other, Node) or not _is_on(other, home):
        return False
    left, before = value_of(other), value_of(user)
    return before.device == home and torch.result_type(torch.empty((1,) * left.dim(), dtype=left.dtype), number) == (
        torch.result_type(torch.empty((1,) * left.dim(), dtype=left.dtype), torch.empty((), dtype=value_of(node).dtype))
    )


def _fits(number: Any, given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a fill casts a number as copying a tensor of ``given`` does: a fill raises where it would overflow."""
    if not torch.can_cast(given, wanted) or wanted == torch.bool or isinstance(number, complex):
        return given == wanted
    if not wanted.is_floating_point and not wanted.is_complex:
        return bool(torch.iinfo(wanted).min <= number <= torch.iinfo(wanted).max)
    return not math.isfinite(number) or abs(number) <= torch.finfo(wanted).max


def _give_number(user: Node, node: Node, number: Any) -> None:
    if user.target in _FILLS or user.target in _COMPARISONS:
        user.target = {**_FILLS, **_COMPARISONS}[user.target]
        user.args = tuple(number if argument is node else argument for argument in user.args)
    elif user.target in _WRITES:
        user.target, user.args, user.kwargs = aten.fill.Scalar, (user.args[0], number), {}
    elif user.args[0] is node:
        user.args = (user.args[1], number)
    else:
        user.replace_input_with(node, number)


def _is_plain_move(user: Node, home: torch.device) -> bool:
    """Whether ``user`` copies to the device, and does nothing else but perhaps a cast."""
    if user.target not in _MOVES or not isinstance(user.target, OpOverload):
        return False
    special = (schema_argument(user, user.target, name) for name in ("memory_format", "pin_memory", "layout"))
    layouts = (None, False, torch.strided, torch.preserve_format)
    return value_of(user).device == home and all(one in layouts for one in special)


def _on_device(node: Node, home: torch.device, dtype: torch.dtype) -> Node:
    """The constructor again, on ``home``, followed by a cast where ``dtype`` is another."""
    kwargs = {**node.kwargs, "dtype": value_of(node).dtype, "device": home}
    kwargs.pop("pin_memory", None)
    with node.graph.inserting_after(node):
        moved = node.graph.call_function(node.target, node.args, kwargs)  # type: ignore[arg-type]  # a call's target
    moved.meta = {**node.meta, "val": _fake_on(value_of(node), home, value_of(node).dtype)}
    if dtype == value_of(node).dtype:
        return moved
    with node.graph.inserting_after(moved):
        cast = node.graph.call_function(aten._to_copy.default, (moved,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": _fake_on(value_of(node), home, dtype)}
    return cast


def _fake_on(value: FakeTensor, home: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor as ``value`` is, on another device; made by the operator, since ``to`` would start up CUDA."""
    with value.fake_mode:
        made: torch.Tensor = aten.empty_strided.default(value.shape, value.stride(), dtype=dtype, device=home)
    return made


def _as_attribute(user: Node, literal: torch.Tensor, is_copied: bool, like: torch.Tensor | None = None) -> Node:
    """A new attribute that holds ``literal`` as ``like`` (else as ``user``) has it; a copy of it if that is written or
    handed out.
    """
    gm = user.graph.owning_module
    assert gm is not None, "a pass works on a module's graph"
    value = value_of(user) if like is None else like
    name = free_name(gm, f"{user.name}_on_{value.device.type}")
    gm.register_buffer(name, literal.to(device=value.device, dtype=value.dtype), persistent=False)
    with user.graph.inserting_before(user):
        constant = user.graph.get_attr(name)
        constant.meta = {**user.meta, "val": value}
        if not is_copied:
            return constant
        copy = user.graph.call_function(aten.clone.default, (constant,))
        copy.meta = dict(user.meta)
    return copy


def _is_on(node: Any, device: torch.device) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.device == device
