"""What Dynamo leaves out of a graph although it could be a value in it: places and lists that are read from data.

``x[i]`` with a 0-dim tensor ``i`` takes a number in ``torch/csrc/autograd/python_variable_indexing.cpp``, which a fake
tensor does not have; but what lies at any place looks alike. ``tolist`` is taken apart for whole numbers alone
(``TensorVariable.method_tolist``). Both would end the graph, and what comes after the end cannot be captured together
with what came before, whether it needs the data or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import utils
from torch._dynamo.variables import builder
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from passes.fakes import at_first_place

MOST_NUMBERS = 16
"""Elements of a floating-point tensor whose ``tolist`` becomes as many values of a graph, each read by itself."""

MOST_SIZES = 3
"""So many graphs of a part have their sizes as constants, before those that have changed become inputs."""


@contextlib.contextmanager
def read_as_values() -> Iterator[None]:
    """While Dynamo reads inside, places and lists that come from data are values of its graph."""
    run_node, method_tolist = utils.run_node, TensorVariable.method_tolist

    @functools.wraps(run_node)
    def at_a_place(tracer: Any, node: torch.fx.Node, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        if node.op in ("call_function", "call_method"):
            args = at_first_place(node.target, tuple(args))
        return run_node(tracer, node, args, kwargs, nnmodule)

    @functools.wraps(method_tolist)
    def tolist(self: TensorVariable, tx: Any) -> VariableTracker:
        return _numbers(self, tx) or method_tolist(self, tx)

    with mock.patch.object(utils, "run_node", at_a_place), mock.patch.object(TensorVariable, "method_tolist", tolist):
        yield


def let_numbers_vary(where: Callable[[], bool]) -> None:
    """Have Dynamo, where that holds, make inputs of numbers that have changed since it last read.

    So it does with sizes, once it has read the same code for `MOST_SIZES` others. Without that
    (``automatic_dynamic_shapes`` is off) each number, and each size, is a graph of its own, until Dynamo gives the code
    up.
    """

    def varying(original: Callable[..., Any], may: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrap(*args: Any, **kwargs: Any) -> Any:
            if not (where() and may(*args)):
                return original(*args, **kwargs)
            with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
                return original(*args, **kwargs)

        return wrap

    for name in ("wrap_symint", "wrap_symfloat"):
        setattr(builder.VariableBuilder, name, varying(getattr(builder.VariableBuilder, name), lambda *_: True))
    vars(builder)["_automatic_dynamic"] = varying(
        vars(builder)["_automatic_dynamic"],
        lambda _, tx, *more: len(eval_frame._debug_get_cache_entry_list(tx.f_code)) >= MOST_SIZES,
    )


def _numbers(variable: TensorVariable, tx: Any) -> VariableTracker | None:
    """The numbers of a tensor of a few real ones, each a value; None for others."""
    value = variable.as_proxy().node.meta["example_value"]
    if not torch._dynamo.config.capture_scalar_outputs or not value.is_floating_point():
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > MOST_NUMBERS:
        return None

    def numbers(sizes: tuple[int, ...], proxy: Any) -> Any:
        if not sizes:
            return builder.wrap_fx_proxy(tx, proxy.item())
        return [numbers(sizes[1:], builder.wrap_fx_proxy(tx, proxy[i]).as_proxy()) for i in range(sizes[0])]

    made: VariableTracker = VariableTracker.build(tx, numbers(tuple(value.shape), variable.as_proxy()))
    return made
