"""A pytest plugin: other projects' names for graphing mean fxgraph's, before their tests are imported.

``python -m pytest -p conformance.swap ...``; :mod:`conformance.upstream` calls it. Replaced are
``torch.cuda.make_graphed_callables`` (and where it is defined, ``torch.cuda.graphs``), the ``cudagraphs`` backend of
``torch.compile``, and ``transformer_engine.pytorch.make_graphed_callables`` where that library is installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.cuda.graphs
from torch._dynamo.backends import registry

import fxgraph
from fxgraph.backend import graphed

# Arguments of TransformerEngine's function that say nothing where FP8 is off; any other value cannot be honoured.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "fp8_enabled": (None, False, (False,)),
    "enabled": (None, False, (False,)),
    "fp8_calibrating": (None, False),
    "calibrating": (None, False),
    "fp8_recipe": (None,),
    "recipe": (None,),
    "fp8_group": (None,),
    "amax_reduction_group": (None,),
    "fp8_weight_caching": (None, False),
    "cache_quantized_params": (None, False),
    "pool": (None,),
    "retain_graph_in_backward": (False,),
    "_order": (None,),
    "_num_layers_per_chunk": (None,),
    "_reuse_graph_input_output_buffers": (False,),
    "_clone_param_grads_on_return": (True, False),
    "_input_output_aliases": (None,),
    "capture_stream": (None,),
    "pre_warmup_hook": (None,),
    "post_warmup_hook": (None,),
    "capture_time_hooks": (None,),
}


def transformer_engine(
    modules: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    **others: Any,
) -> Any:
    """TransformerEngine's signature, fxgraph's function.

    Raises:
        NotImplementedError: for an argument that fxgraph has no counterpart of, unless its value says nothing.
    """
    for name, value in others.items():
        neutral = _NEUTRAL.get(name, ())
        if not any(value is one or value == one for one in neutral):
            raise NotImplementedError(f"fxgraph.make_graphed_callables has nothing for {name}={value!r}")
    return fxgraph.make_graphed_callables(
        modules, sample_args, num_warmup_iters, allow_unused_input, sample_kwargs=sample_kwargs
    )


def swap() -> list[str]:
    """Put fxgraph's names in place of the others'; gives the replaced ones."""
    torch.cuda.make_graphed_callables = fxgraph.make_graphed_callables
    torch.cuda.graphs.make_graphed_callables = fxgraph.make_graphed_callables
    registry.lookup_backend("cudagraphs")  # so that it is registered, and not again later
    registry._COMPILER_FNS["cudagraphs"] = graphed
    replaced = ["torch.cuda.make_graphed_callables", 'torch.compile(backend="cudagraphs")']
    if importlib.util.find_spec("transformer_engine") is not None:
        import transformer_engine.pytorch as te

        te.make_graphed_callables = transformer_engine
        replaced.append("transformer_engine.pytorch.make_graphed_callables")
    return replaced


_REPLACED = swap()


def pytest_report_header() -> str:
    """Says in pytest's first lines what was replaced."""
    return "fxgraph in place of: " + ", ".join(_REPLACED)
