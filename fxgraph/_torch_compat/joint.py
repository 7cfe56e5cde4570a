"""What torch leaves on the nodes of a joint graph, made for nodes that no tracer has made.

``FakeTensor`` of ``torch._subclasses.fake_tensor`` in ``meta['val']``, ``NodeSource`` of ``torch.fx.traceback`` in
``meta['from_node']``, the descriptors of ``torch._functorch._aot_autograd.descriptors`` in ``meta['desc']``, and
AOTAutograd's ``ViewAndMutationMeta``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import NodeSource
from torch.utils import _pytree as pytree


class Memory:
    """Fake values like others, where some of the storages are others: those of one layer, and what stands for them."""

    def __init__(self) -> None:
        self._stands: dict[int, torch.UntypedStorage] = {}

    def identify(self, value: Any, other: Any) -> None:
        """What lies in the memory of ``value`` will lie in that of ``other``."""
        for one, two in zip(_fakes(value), _fakes(other), strict=True):
            self._stands.setdefault(one.untyped_storage()._cdata, two.untyped_storage())

    def moves(self, value: Any) -> bool:
        """Whether something else stands for memory of a value."""
        own = [fake.untyped_storage() for fake in _fakes(value)]
        return any(self._stands.get(one._cdata, one)._cdata != one._cdata for one in own)

    def like(self, value: Any) -> Any:
        """A value like this one, in memory that stands for its memory: new memory where nothing has been said."""
        return self._like(value) if type(value) is FakeTensor else pytree.tree_map_only(FakeTensor, self._like, value)

    def _like(self, fake: FakeTensor) -> FakeTensor:
        own = fake.untyped_storage()
        storage = self._stands.get(own._cdata)
        if storage is None:
            storage = self._stands[own._cdata] = torch.UntypedStorage(own.nbytes(), device="meta")
        with torch._C.DisableTorchFunctionSubclass():
            meta = torch.empty(0, dtype=fake.dtype, device="meta")
            meta.set_(storage, fake.storage_offset(), fake.size(), fake.stride())
        return FakeTensor(fake.fake_mode, meta, fake.device)


def _fakes(value: Any) -> list[FakeTensor]:
    if type(value) is FakeTensor:
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, FakeTensor)]


def look_of(value: Any) -> Any:
    """All of a node's fake value but its memory; None where it has something that :class:`Memory` cannot give."""
    if isinstance(value, (tuple, list)):
        looks = [look_of(one) for one in value]
        return None if any(look is None for look in looks) else (type(value), *looks)
    if value is None or type(value) in (int, float, bool):
        return type(value), repr(value)
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.requires_grad:
        return None
    numbers = (*value.size(), *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    if value.is_conj() or value.is_neg() or not all(type(number) is int for number in numbers):
        return None
    return value.dtype, value.device, value.dim(), numbers


def traced_from(node: fx.Node, like: Sequence[Any]) -> list[NodeSource]:
    """``meta['from_node']`` as another node has it, for one that stems from ``node``."""
    return [NodeSource(node, source.pass_name, source.action) for source in like]


def is_input(desc: Any, index: int) -> bool:
    """Whether a placeholder is the input of that index as it was given."""
    return type(desc) is PlainAOTInput and desc.idx == index


def input_desc(index: int) -> Any:
    """The descriptor of an input."""
    return PlainAOTInput(index)


def gradient_desc(index: int) -> Any:
    """The descriptor of an input's gradient."""
    return GradAOTOutput(PlainAOTInput(index))


def touches_inputs(metadata: Any) -> bool:
    """Whether inputs are written, or outputs lie in their memory, or effects are kept in order."""
    aliases = (OutputType.alias_of_input, OutputType.is_input)
    return bool(
        metadata.mutated_inp_runtime_indices
        or metadata.mutated_graph_handled_indices
        or metadata.tokens
        or any(info.output_type in aliases for info in metadata.output_info)
    )


def with_inputs(metadata: Any, infos: Sequence[Any]) -> Any:
    """The metadata of a graph with other inputs, where :func:`touches_inputs` is false: they are named nowhere else."""
    changed = copy.copy(metadata)
    changed.input_info = list(infos)
    return changed
