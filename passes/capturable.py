"""What can be held in a CUDA graph.

`CAPTURABLE` is the list: one rule per reason why an op cannot. `check` judges any FX GraphModule by it, ATen-level
(AOTAutograd, make_fx) or torch-level (symbolic_trace, Dynamo, export). The more fake values (``node.meta["val"]``) a
graph carries, the more can be seen: rules on devices, layouts and types need them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import GraphModule

from .capturable_collectives import Collective
from .capturable_ops import (
    CudagraphUnsafeOp,
    DataDependentShape,
    HigherOrderOp,
    HostSync,
    PrintSideEffect,
    UnregisteredGenerator,
)
from .capturable_tensors import NoFakeImpl, SeveralDevices, TensorSubclass, UnsupportedLayout
from .constraint import Constraint, NodeConstraint, Report, as_graph_module, judge

CAPTURABLE: tuple[NodeConstraint, ...] = (
    HostSync(),
    DataDependentShape(),
    SeveralDevices(),
    CudagraphUnsafeOp(),
    HigherOrderOp(),
    UnregisteredGenerator(),
    NoFakeImpl(),
    UnsupportedLayout(),
    TensorSubclass(),
    Collective(),
    PrintSideEffect(),
)
"""The rules on a graph that is to be captured, in the order in which they are reported."""


def check(gm: GraphModule, constraints: Iterable[Constraint[GraphModule]] = CAPTURABLE) -> Report:
    """Judge every node of ``gm`` by every constraint; nothing is run, captured or changed, and no GPU is needed.

    Raises:
        TypeError: if ``gm`` is no GraphModule; it says how to get one.
    """
    return judge(as_graph_module(gm), constraints)
