"""The seed of memory-efficient attention's dropout, whose device depends on whether a graph is being captured.

While one is, the op's forward leaves seed and offset on the device, and its backward reads them there. Otherwise both
have them on the host, and the backward takes the pointer of a device's tensor for one of the host's, which ends the
process (``attention_backward.cu`` in ``aten/src/ATen/native/transformers/cuda``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

_SEEDED = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
)


_DRAWING = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._efficient_attention_forward.default,
)
_OF_SEEDS = ("philox_seed", "philox_offset")


def has_seed(results: Iterable[Any]) -> bool:
    """Whether the seed or the offset of a forward is among the results of a graph."""
    for result in results:
        source = result.args[0] if isinstance(result, fx.Node) and result.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.target in _DRAWING:
            returns = source.target._schema.returns
            if returns[result.args[1]].name in _OF_SEEDS:
                return True
    return False


def seeds(backward: fx.GraphModule) -> tuple[int, ...]:
    """Inputs of a backward that hold the seed and the offset with which its forward has drawn."""
    index_of = {node: i for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    found: set[int] = set()
    for target in _SEEDED:
        positions = [k for k, a in enumerate(target._schema.arguments) if a.name in _OF_SEEDS]
        for node in backward.graph.find_nodes(op="call_function", target=target):
            found.update(index_of[node.args[k]] for k in positions if node.args[k] in index_of)
    return tuple(sorted(found))


def outside_of_captures(inputs: Sequence[torch.Tensor], seeds: Sequence[int]) -> list[torch.Tensor]:
    """A backward's inputs for running it where no graph is captured, after a forward that was."""
    return [value.cpu() if i in seeds else value for i, value in enumerate(inputs)]
