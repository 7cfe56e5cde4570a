"""The ways in which a callable is graphed. An entry takes a callable and sample arguments and gives the graphed one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import fxgraph

Entry = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Callable[..., Any]]


def make_graphed_callables(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``fxgraph.make_graphed_callables``, which captures here and now."""
    return fxgraph.make_graphed_callables(target, args, allow_unused_input=True, sample_kwargs=kwargs)


def compiled(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.compile(backend="graphed")``, which captures at the first call."""
    del args, kwargs
    return torch.compile(target, backend="graphed")


ENTRIES: dict[str, Entry] = {"make_graphed_callables": make_graphed_callables, "compile": compiled}


def resolve(name: str) -> Entry:
    """The entry of this name, or of this ``module:attribute``.

    Raises:
        KeyError: for a name that is neither.
    """
    if ":" not in name:
        return ENTRIES[name]
    module, _, attribute = name.partition(":")
    found: Entry = getattr(importlib.import_module(module), attribute)
    return found
