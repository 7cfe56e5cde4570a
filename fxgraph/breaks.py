"""``fxgraph.eager``: pieces of a callable that are to run eagerly, with what is around them captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound="Callable[..., Any]")


class eager:  # reads as the function and the context manager that it is, like torch.no_grad
    """Run a function, or a ``with`` block, eagerly inside of a graphed callable.

    As a decorator, or called with a function: ``fxgraph.eager(function)`` is a function that no graph takes in. As a
    context manager: ``with fxgraph.eager():``. What comes before and after is captured, with ``torch.compile`` and with
    ``make_graphed_callables`` and ``on_uncapturable="split"``; a function that holds the ``with`` block itself runs
    eagerly, and the modules and functions that it calls outside of the block are captured. Outside of graphed callables
    both change nothing.

    Example:
        >>> @fxgraph.eager
        ... def log(x):
        ...     history.append(x.detach().mean().item())
    """

    def __new__(cls, function: F | None = None) -> Any:
        """The function itself, marked; without one a context manager."""
        if function is None:
            return super().__new__(cls)
        if not callable(function):
            raise TypeError(f"fxgraph.eager() takes a function or nothing, not {type(function).__name__}")
        return torch.compiler.disable(function, reason="marked with fxgraph.eager")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it bare
    def __enter__(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it bare
    def __exit__(self, *error: object) -> None:
        self._stance.__exit__(None, None, None)
