"""Rules on the callable itself: what it is, its hooks, its parameters and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as nn_module

from .call_site import CallSite, code_owner, definition
from .constraint import Constraint, Violation
from .facts import describe_tensor


@dataclass(frozen=True)
class NotCallable(Constraint[CallSite]):
    """What is to be captured must be a function or a module."""

    id: ClassVar[str] = "not-callable"
    title: ClassVar[str] = "what is to be captured cannot be called"
    why: ClassVar[str] = "a capture records one call"
    hint: ClassVar[str] = "pass a function or a torch.nn.Module"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation if ``subject.callable`` is not callable, or a call of it does not run its body."""
        target = subject.callable
        body = code_owner(target) if callable(target) else None
        observed = None
        if not callable(target):
            observed = f"an object of type {type(target).__name__}"
        elif inspect.isclass(target):
            observed = f"the class {target.__name__}"
        elif inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            observed = "a generator function"
        elif inspect.iscoroutinefunction(body):
            observed = "a coroutine function"
        if observed is not None:
            yield self.violation(subject.where(), observed, "a function or a torch.nn.Module")


@dataclass(frozen=True)
class ScriptedCallable(Constraint[CallSite]):
    """Neither the callable nor a submodule may be compiled by TorchScript."""

    id: ClassVar[str] = "scripted-callable"
    title: ClassVar[str] = "the callable is compiled by TorchScript"
    why: ClassVar[str] = "TorchScript runs its own interpreter, whose ops a tracer of Python cannot see"
    hint: ClassVar[str] = "pass the Python module or function that was scripted or traced"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield the callable, or each outermost scripted submodule."""
        scripted: list[str] = []
        if isinstance(subject.callable, torch.jit.ScriptFunction):
            yield self.violation(subject.where(), "a torch.jit.ScriptFunction", "a Python function")
        elif subject.module is not None:
            for name, child in subject.module.named_modules():
                if isinstance(child, torch.jit.ScriptModule) and not any(_inside(name, outer) for outer in scripted):
                    scripted.append(name)
                    observed = f"a {_jit_kind(child)}"
                    yield self.violation(subject.where(_module_path(name)), observed, "a torch.nn.Module")


@dataclass(frozen=True)
class ModuleHooks(Constraint[CallSite]):
    """No module may have a hook that runs on its call.

    That is: forward, forward-pre, backward, backward-pre, of any variant, on the module, on any submodule, or
    registered for all modules. State-dict, parameter and tensor hooks are harmless, and so are those of torch.export,
    which check the inputs' shapes and dtypes: a call that would not pass them has another signature.
    """

    id: ClassVar[str] = "module-hooks"
    title: ClassVar[str] = "a module has a hook that a replay would not run"
    why: ClassVar[str] = "a replay runs no Python, so the hook would be silently skipped"
    hint: ClassVar[str] = "remove the hook, capture, and register it again on the outermost module"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per hook."""
        if subject.module is None:
            return
        for name, child in subject.module.named_modules():
            if name or subject.runs_root_hooks:
                for kind, hook in module_hooks(child):
                    if getattr(hook, "__module__", "") == "torch.export._unlift":
                        continue
                    observed = f"{kind} {describe_hook(hook)}"
                    yield self.violation(subject.where(_module_path(name)), observed, "no hook", _instead_of(hook))
        for kind, hook in global_hooks():
            yield self.violation(
                subject.where("every module"),
                f"global {kind} {describe_hook(hook)}",
                "no hook",
                "remove the hook before capturing; it is registered for all modules, by a tool rather than the model",
            )


_INSTEAD = {  # of hooks that compute a weight before each call: where torch defines them
    "torch.nn.utils.weight_norm": "use torch.nn.utils.parametrizations.weight_norm, which needs no hook "
    "(torch.nn.utils.remove_weight_norm takes this one away)",
    "torch.nn.utils.spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm, which needs no hook "
    "(torch.nn.utils.remove_spectral_norm takes this one away)",
    "torch.nn.utils.prune": "make the pruning permanent with torch.nn.utils.prune.remove(module, name), or multiply "
    "with the mask in a parametrization (torch.nn.utils.parametrize)",
}


def _instead_of(hook: Any) -> str | None:
    """What to use instead of a hook of torch's own; None for the usual hint."""
    return next((_INSTEAD[base.__module__] for base in type(hook).__mro__ if base.__module__ in _INSTEAD), None)


def module_hooks(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield ``(kind, hook)`` of the hooks that run when ``module`` is called, in the order in which they would run."""
    for key, hook in module._forward_pre_hooks.items():
        yield "forward-pre hook" + (" with kwargs" if key in module._forward_pre_hooks_with_kwargs else ""), hook
    for key, hook in module._forward_hooks.items():
        kind = "forward hook" + (" with kwargs" if key in module._forward_hooks_with_kwargs else "")
        yield kind + (" with always_call" if key in module._forward_hooks_always_called else ""), hook
    for hook in module._backward_pre_hooks.values():
        yield "backward-pre hook", hook
    for hook in module._backward_hooks.values():
        yield "backward hook" if module._is_full_backward_hook else "backward hook (not full)", hook


def global_hooks() -> Iterator[tuple[str, Any]]:
    """Yield ``(kind, hook)`` of the hooks registered for all modules of the process."""
    tables = (
        ("forward-pre hook", nn_module._global_forward_pre_hooks),
        ("forward hook", nn_module._global_forward_hooks),
        ("backward-pre hook", nn_module._global_backward_pre_hooks),
        ("backward hook", nn_module._global_backward_hooks),
    )
    return ((kind, hook) for kind, table in tables for hook in table.values())


def describe_hook(hook: Any) -> str:
    """Return the hook's name and, where it is written in Python, its file:line."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    file, line = definition(hook)
    return f"{name!r}" if file is None else f"{name!r} ({file}:{line})"


@dataclass(frozen=True)
class BufferRequiresGrad(Constraint[CallSite]):
    """Only parameters may be trainable; every buffer of every submodule has ``requires_grad=False``."""

    id: ClassVar[str] = "buffer-requires-grad"
    title: ClassVar[str] = "a buffer requires grad"
    why: ClassVar[str] = "buffers are state that the graph reads and writes in place, not inputs of the autograd node"
    hint: ClassVar[str] = "make it a torch.nn.Parameter, or call requires_grad_(False) on it"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per such buffer."""
        for name, buffer in subject.module.named_buffers() if subject.module is not None else ():
            if buffer.requires_grad:
                observed = f"requires_grad=True, {describe_tensor(buffer)}"
                yield self.violation(subject.where(f"buffer {name!r}"), observed, "requires_grad=False")


@dataclass(frozen=True)
class MetaTensor(Constraint[CallSite]):
    """No argument, parameter or buffer may be on the meta device."""

    id: ClassVar[str] = "meta-tensor"
    title: ClassVar[str] = "a tensor is on the meta device and has no data"
    why: ClassVar[str] = "a capture runs the kernels once, on real memory"
    hint: ClassVar[str] = "materialise it first, e.g. with module.to_empty(device=...) and an initialisation"

    def violations(self, subject: CallSite) -> Iterator[Violation]:
        """Yield one violation per such tensor."""
        for path, tensor in subject.tensors():
            if tensor.is_meta:
                yield self.violation(subject.where(path), "device meta", "a device with memory, such as cpu or cuda:0")


def _module_path(name: str) -> str:
    return f"module {name!r}" if name else "the module itself"


def _inside(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")


def _jit_kind(module: torch.jit.ScriptModule) -> str:
    original = getattr(module, "original_name", None)
    return f"torch.jit.ScriptModule of {original}" if original else "torch.jit.ScriptModule"
