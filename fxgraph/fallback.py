"""How fxgraph says, once for each reason, that something does not run as it was asked to. A leaf."""

from __future__ import annotations

import sys
import warnings

from passes.facts import is_library_file


class EagerFallbackWarning(UserWarning):
    """A graphed callable runs eagerly. The result is right; the speed is eager's."""


class KernelFallbackWarning(UserWarning):
    """A callable that should run on inductor's kernels runs on aten's. The result is right; the speed is theirs."""


def warn(message: str, category: type[Warning] = EagerFallbackWarning) -> None:
    """Warn at the line of the user's code from which we were called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and is_library_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"fxgraph: {message}", category, stacklevel=level)
