"""``fxgraph.eager``: pieces of a callable that are to run eagerly, with what is around them captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_REASON = "marked with fxgraph.eager"


class eager:  # reads as the function and the context manager that it is, like torch.no_grad
    """Run a function, or a ``with`` block, eagerly inside of a graphed callable.

    As a decorator, with or without empty parentheses, or called with a function: ``fxgraph.eager(function)`` is a
    function that no graph takes in. Called with a module, it marks the module's ``forward`` and returns the same
    object; copies of it are marked too. As a context manager: ``with fxgraph.eager():``. What comes before and after is
    captured, with ``torch.compile`` and with ``make_graphed_callables`` (``on_uncapturable="split"``); a function that
    holds the ``with`` block itself runs eagerly, and the modules and functions that it calls outside of the block are
    captured. Outside of graphed callables nothing changes.

    Example:
        >>> @fxgraph.eager
        ... def log(x):
        ...     history.append(x.detach().mean().item())
    """

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        """The function or module itself, marked; without one a context manager, and a decorator."""
        if function is None:
            return super().__new__(cls)
        if isinstance(function, torch.nn.Module):
            return _marked(function)
        if not callable(function):
            raise TypeError(f"fxgraph.eager() takes a function, a module or nothing, not {type(function).__name__}")
        return torch.compiler.disable(function, reason=_REASON)

    def __call__(self, function: Callable[..., Any]) -> Any:
        """``@fxgraph.eager()`` is ``@fxgraph.eager``."""
        return eager(function)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it bare
    def __enter__(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it bare
    def __exit__(self, *error: object) -> None:
        self._stance.__exit__(None, None, None)


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]  # torch leaves it bare
def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator]  # torch leaves it bare
def _run_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _marked(module: torch.nn.Module) -> torch.nn.Module:
    """The same module with a ``forward`` of its own, made of what ``copy.deepcopy`` and ``pickle`` take along."""
    own = vars(module).get("forward")
    if isinstance(own, functools.partial) and own.func in (_run, _run_forward):
        return module
    module.forward = functools.partial(_run_forward, module) if own is None else functools.partial(_run, own)
    return module
