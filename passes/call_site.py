"""The subject of the contract: a callable with the arguments it is to be captured for; what can be read off both."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .constraint import Where


@dataclass(frozen=True)
class CallSite:
    """One callable and one set of arguments.

    Attributes:
        callable: what is called; it may be anything, the rules refuse what is not callable.
        args: positional arguments.
        kwargs: keyword arguments.
        name: the place in messages, e.g. ``callables[2]``; empty when there is only one.

    Raises:
        TypeError: if ``args`` is not a tuple or ``kwargs`` is not a dict with string keys.
    """

    callable: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        args, kwargs = _untyped(self.args), _untyped(self.kwargs)
        if not isinstance(args, tuple):
            raise TypeError(f"args must be a tuple, got {type(args).__name__}")
        if not isinstance(kwargs, dict):
            raise TypeError(f"kwargs must be a dict, got {type(kwargs).__name__}")
        for key in kwargs:
            if not isinstance(key, str):
                raise TypeError(f"kwargs must have string keys, got {key!r}")

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose parameters and buffers the call uses: the callable itself, the owner of a bound method, or
        what a `functools.partial` wraps; None for a plain function.
        """
        target = self.callable
        while isinstance(target, functools.partial):
            target = target.func
        if isinstance(target, MethodType):
            target = target.__self__
        return target if isinstance(target, torch.nn.Module) else None

    @property
    def runs_root_hooks(self) -> bool:
        """Whether the call goes through ``module.__call__``; ``module.forward`` and others skip the root's hooks."""
        target = self.callable
        while isinstance(target, functools.partial):
            target = target.func
        return not isinstance(target, MethodType) or target.__name__ in ("__call__", "_call_impl", "_wrapped_call_impl")

    def where(self, path: str | None = None) -> Where:
        """Return the definition of the forward, with ``path`` as the value in question."""
        parts = [part for part in (self.name, path) if part]
        file, line = definition(self.callable)
        return Where(file=file, line=line, path=", ".join(parts) or None)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(path, leaf)`` of the arguments, in call order.

        Containers are what `torch.utils._pytree` knows, frozen dataclasses and frozensets.
        """
        for index, value in enumerate(self.args):
            yield from _leaves(f"args[{index}]", value)
        for key, value in self.kwargs.items():
            yield from _leaves(f"kwargs[{key!r}]", value)

    def tensor_arguments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(path, tensor)`` of the tensors among the arguments."""
        return ((path, leaf) for path, leaf in self.leaves() if isinstance(leaf, torch.Tensor))

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(path, tensor)`` of the module's parameters and buffers, each tensor once."""
        if self.module is not None:
            for name, parameter in self.module.named_parameters():
                yield f"parameter {name!r}", parameter
            for name, buffer in self.module.named_buffers():
                yield f"buffer {name!r}", buffer

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(path, tensor)`` of everything the call reads: parameters, buffers, tensor arguments."""
        yield from self.state()
        yield from self.tensor_arguments()


def _untyped(value: Any) -> Any:
    return value


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    flat, _ = pytree.tree_flatten_with_path(value)
    for keys, leaf in flat:
        place = path + pytree.keystr(keys)
        if isinstance(leaf, frozenset):
            for item in sorted(leaf, key=repr):
                yield from _leaves(f"{place}{{...}}", item)
        elif is_frozen_dataclass(leaf):
            for member in dataclasses.fields(leaf):
                yield from _leaves(f"{place}.{member.name}", getattr(leaf, member.name))
        else:
            yield place, leaf


def is_frozen_dataclass(value: Any) -> bool:
    """Return whether ``value`` is an instance of a dataclass declared with ``frozen=True``."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def code_owner(target: Any) -> Callable[..., Any] | None:
    """Return the Python function whose body runs when ``target`` is called.

    That is a module's forward, or what a partial, a bound method or a decorator wraps; None if it is not Python.
    """
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, torch.nn.Module):
        target = target.forward
    elif not inspect.isroutine(target) and not inspect.isclass(target) and callable(target):
        target = type(target).__call__
    target = target.__func__ if isinstance(target, MethodType) else target
    target = inspect.unwrap(target) if callable(target) else target
    return target if inspect.isfunction(target) else None


def definition(target: Any) -> tuple[str | None, int | None]:
    """Return file and line where the code of ``target`` is defined, or ``(None, None)``. The file need not exist."""
    function = code_owner(target)
    return (function.__code__.co_filename, function.__code__.co_firstlineno) if function is not None else (None, None)
