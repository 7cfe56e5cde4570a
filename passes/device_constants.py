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

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from .base import Pass
from .capturable_tensors import home_device
from .constraint import Constraint
from .effects import Effects
from .facts import constant_of, schema_argument, value_of
from .lower import free_name
from .verify import AtenLevel, HasFakeValues

aten = torch.ops.aten

# Elementwise operators that take a number where they take a 0-dim tensor, with the same result.
_TAKES_NUMBER = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode})
_TAKES_NUMBER_IN_PLACE = frozenset({aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor})
_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
    | {aten._unsafe_index_put.default}
)
_MOVES = frozenset({aten._to_copy.default, aten.to.device, aten.to.dtype_layout, torch.ops.prims.device_put.default})
_LITERALS = frozenset({aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default, aten.clone.default})
_CPU = torch.device("cpu")
_FILLED = frozenset({aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default})


@dataclass(frozen=True)
class MoveConstantsToDevice(Pass):
    """Take constants that live on the CPU out of a graph whose tensors live on another device.

    What counts as a constant: ``full``, ``zeros``, ``ones``, ``scalar_tensor`` and whole-numbered ``arange`` on the
    CPU, literals (``lift_fresh_copy`` of an attribute, as ``torch.tensor(2.0)`` is traced), and the attributes that are
    listed. Three uses of one are rewritten, the only ones whose bits are sure to stay:

    * a 0-dim one as operand of ``add``, ``sub``, ``mul`` or ``div`` with a device tensor becomes a Python number where
      the result's dtype stays; see Note [Host scalars as numbers];
    * a constructor that is an index of device memory, or is copied to the device, is made on the device;
    * a literal or listed attribute that is copied to the device becomes an attribute on the device, copied once, now.

    A graph whose tensors are all on one device is left as it is. Nodes that become unused stay: see `RemoveDeadCode`.

    Attributes:
        attributes: names of attributes whose values never change, such as a table; others are state that may.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    attributes: tuple[str, ...] = ()

    def rewrite(self, gm: GraphModule) -> bool:
        """Rewrite the uses and return whether there were any."""
        home = home_device(gm.graph)
        if home is None:
            return False
        effects = Effects.of(gm)
        changed = False
        for node in list(gm.graph.nodes):
            if not isinstance(value_of(node), FakeTensor) or not _is_on(node, _CPU) or effects.is_written(node):
                continue
            literal = self._literal(node, effects)
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


def _move(
    node: Node, user: Node, home: torch.device, literal: torch.Tensor | None, number: Any, effects: Effects
) -> bool:
    """Rewrite one use of a constant, if it is one of those that can be; return whether it was."""
    if number is not None and _takes_number(user, node, number, home):
        user.replace_input_with(node, number)
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
    if user.target not in _TAKES_NUMBER | _TAKES_NUMBER_IN_PLACE or places != [1] or not _is_on(user.args[0], home):
        return False
    assert isinstance(user.args[0], Node), "it has a device"
    left, before = value_of(user.args[0]), value_of(user)
    return before.device == home and torch.result_type(torch.empty((1,) * left.dim(), dtype=left.dtype), number) == (
        torch.result_type(torch.empty((1,) * left.dim(), dtype=left.dtype), torch.empty((), dtype=value_of(node).dtype))
    )


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


def _as_attribute(user: Node, literal: torch.Tensor, is_copied: bool) -> Node:
    """A new attribute that holds ``literal`` on the device; a copy of it if that is written or handed out."""
    gm = user.graph.owning_module
    assert gm is not None, "a pass works on a module's graph"
    value = value_of(user)
    name = free_name(gm, f"{user.name}_on_{value.device.type}")
    gm.register_buffer(name, literal.to(device=value.device, dtype=value.dtype), persistent=False)
    with user.graph.inserting_before(user):
        constant = user.graph.get_attr(name)
        constant.meta = dict(user.meta)
        if not is_copied:
            return constant
        copy = user.graph.call_function(aten.clone.default, (constant,))
        copy.meta = dict(user.meta)
    return copy


def _is_on(node: Any, device: torch.device) -> bool:
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.device == device
