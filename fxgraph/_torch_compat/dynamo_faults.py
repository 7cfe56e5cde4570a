"""Graphs that Dynamo gets wrong in silence, and how they are known."""

from __future__ import annotations

import torch
import torch._numpy
from torch._dynamo.utils import (
    numpy_attr_wrapper,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree


class Miscompiled(Exception):
    """Dynamo's graph is known to be wrong."""


class NumpyOnData(Miscompiled):
    """numpy's functions were given what is only known when the graph runs, or draw random numbers."""


def refuse_miscompiled(graph: torch.fx.GraphModule) -> None:
    """Refuse graphs that this version of Dynamo gets wrong in silence.

    Before torch 2.13, a ``torch.autograd.Function`` that is given one tensor as two arguments loses a gradient (PyTorch
    issue 183604; seen on 2.11.0, right on 2.13.0). The graph does not show which calls are concerned, so all of them
    are refused. In all versions (up to 2.13.0) ``set_materialize_grads(False)`` is lost, which the graph does not show
    either; it concerns functions with several outputs.

    numpy's functions become torch's (``torch._numpy``). Those of constants are exact enough to be eager's; sums of data
    have other bits.

    Raises:
        Miscompiled: if there is such a node.
    """
    _refuse_numpy_on_data(graph)
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply)
    for node in nodes:
        if len(pytree.tree_leaves(node.meta.get("example_value"))) > 1:
            raise Miscompiled(
                "a torch.autograd.Function with several outputs: where it calls set_materialize_grads(False), Dynamo "
                "would give it zeros for gradients that are None"
            )
    if nodes and TorchVersion(torch.__version__) < "2.13":
        raise Miscompiled(
            "a torch.autograd.Function, whose gradients Dynamo gets wrong in some cases before torch 2.13"
        )


_NUMPY = (numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper)


def _refuse_numpy_on_data(graph: torch.fx.GraphModule) -> None:
    data: set[torch.fx.Node] = set()
    for node in graph.graph.nodes:
        draws = getattr(getattr(node.target, "f", None), "__module__", "") == torch._numpy.random.__name__
        if draws or node.op in ("placeholder", "get_attr") or not data.isdisjoint(node.all_input_nodes):
            data.add(node)
            if draws or isinstance(node.target, _NUMPY) or node.target is numpy_attr_wrapper:
                raise NumpyOnData(
                    "numpy's functions on data, or its random numbers, which Dynamo would take from torch"
                )
