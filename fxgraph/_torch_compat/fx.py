"""torch.fx's lazy graph modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


@contextlib.contextmanager
def code_later() -> Iterator[None]:
    """Graph modules that torch makes inside generate their code when they are first called, or by
    :func:`compile_now`: the code of a graph that is cut or changed next is never asked for.

    Torch has one flag for that in the process, which each user puts back to what it found: two threads that take turns
    at it would leave it on for ever. Dynamo changes it under this lock.
    """
    with compile_lock, _use_lazy_graph_module(True):
        yield


def lazy_graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module like ``root``, with another graph, whose code is generated when it is first asked for."""
    made = _LazyGraphModule(root, graph)
    made.meta.update(root.meta)
    return made


def compile_now(target: Any) -> None:
    """Generate the code of a lazy ``GraphModule``, which Dynamo hands to backends; anything else is left alone.

    Until its first call such a module's ``forward`` belongs to its class, generates the code and calls the module
    again: with a ``forward`` of ours on the module, without end.
    """
    _LazyGraphModule.force_recompile(target)
