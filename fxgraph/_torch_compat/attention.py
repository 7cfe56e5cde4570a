"""The seed of memory-efficient attention's dropout, whose device depends on whether a graph is being captured.

While one is, the op's forward leaves seed and offset on the device, and its backward reads them there. Otherwise both
have them on the host, and the backward takes the pointer of a device's tensor for one of the host's, which ends the
process (``attention_backward.cu`` in ``aten/src/ATen/native/transformers/cuda``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

_SEEDED = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._efficient_attention_backward.default,
)


def seeds(backward: fx.GraphModule) -> tuple[int, ...]:
    """Inputs of a backward that hold the seed and the offset with which its forward has drawn."""
    index_of = {node: i for i, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    found: set[int] = set()
    for target in _SEEDED:
        positions = [k for k, a in enumerate(target._schema.arguments) if a.name in ("philox_seed", "philox_offset")]
        for node in backward.graph.find_nodes(op="call_function", target=target):
            found.update(index_of[node.args[k]] for k in positions if node.args[k] in index_of)
    return tuple(sorted(found))


def outside_of_captures(inputs: Sequence[torch.Tensor], seeds: Sequence[int]) -> list[torch.Tensor]:
    """A backward's inputs for running it where no graph is captured, after a forward that was."""
    return [value.cpu() if i in seeds else value for i, value in enumerate(inputs)]
