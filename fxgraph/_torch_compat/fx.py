"""torch.fx's lazy graph modules."""

from __future__ import annotations

from typing import Any

from torch.fx._lazy_graph_module import _LazyGraphModule


def compile_now(target: Any) -> None:
    """Generate the code of a lazy ``GraphModule``, which Dynamo hands to backends; anything else is left alone.

    Until its first call such a module's ``forward`` belongs to its class, generates the code and calls the module
    again: with a ``forward`` of ours on the module, without end.
    """
    _LazyGraphModule.force_recompile(target)
