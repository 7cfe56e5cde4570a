"""Random numbers drawn into memory of the layout that eager draws into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from .base import Pass
from .constraint import Constraint
from .verify import AtenLevel

aten = torch.ops.aten


@dataclass(frozen=True)
class DrawInPlace(Pass):
    """Turn ``aten.bernoulli.p(empty_like(x), p)`` into ``aten.bernoulli_.float(empty_like(x), p)``.

    Functionalisation makes the former out of dropout's ``empty_like(x).bernoulli_(p)``. The two differ: the functional
    op ignores the memory format of its argument (``aten/src/ATen/native/Distributions.cpp``), so for an ``x`` that is
    not contiguous the same draws land at other elements. An ``empty_like`` with other users stays as it is.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(),)

    def rewrite(self, gm: GraphModule) -> bool:
        """Replace the calls and return whether there were any."""
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=aten.bernoulli.p):
            memory = node.args[0]
            fresh = isinstance(memory, torch.fx.Node) and memory.target is aten.empty_like.default
            if fresh and len(memory.users) == 1:
                node.target = aten.bernoulli_.float
                changed = True
        return changed
