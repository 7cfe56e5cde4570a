"""Capture the forward and backward of PyTorch callables as CUDA graphs, equal to eager or refused with a reason.

Two entries: :func:`make_graphed_callables`, and ``torch.compile(model, backend="graphed")``.
"""

from __future__ import annotations

from ._version import __version__

# `passes` is a common name: a user's own passes.py, or another distribution, may stand in the way of ours.
_MARK = "__fxgraph_version_mark__"
try:
    import passes
except ImportError as _error:
    raise ImportError("fxgraph needs its own package 'passes', which is not importable: reinstall fxgraph") from _error
if getattr(passes, _MARK, None) != __version__:
    raise ImportError(
        f"fxgraph {__version__} needs its own package 'passes', but 'passes' is "
        f"{getattr(passes, '__file__', passes)!r}. "
        "Rename that module, or take its folder out of sys.path."
    )

from .api import make_graphed_callables, ungraph
from .backend import graphed as _backend
from .breaks import eager
from .checking import check
from .errors import (
    CaptureError,
    ContractError,
    DoubleBackwardError,
    FxgraphError,
    InputError,
    OptionError,
    ReplayError,
    SignatureError,
    TraceError,
    UncapturableError,
    VerifyError,
)
from .fallback import EagerFallbackWarning, KernelFallbackWarning
from .options import Options
from .stats import Stats, stats

__all__ = [
    "CaptureError",
    "ContractError",
    "DoubleBackwardError",
    "EagerFallbackWarning",
    "FxgraphError",
    "InputError",
    "KernelFallbackWarning",
    "OptionError",
    "Options",
    "ReplayError",
    "SignatureError",
    "Stats",
    "TraceError",
    "UncapturableError",
    "VerifyError",
    "__version__",
    "check",
    "eager",
    "make_graphed_callables",
    "passes",
    "stats",
    "ungraph",
]


def _register() -> None:
    """Make ``backend="graphed"`` known where the package is imported but not installed.

    Where it is installed, torch finds the entry point by itself, and refuses a name that is registered twice.
    """
    from importlib.metadata import entry_points

    from torch._dynamo.backends.registry import register_backend

    if "graphed" not in entry_points(group="torch_dynamo_backends").names:
        register_backend(compiler_fn=_backend, name="graphed")


_register()
