"""A callable with its traces: which of them fits a call, and what happens when none does."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

import passes

from . import engines, fallback, stages, trace
from ._torch_compat import dynamo
from ._torch_compat.autograd import why_not_replay
from ._torch_compat.fx import compile_now
from .engines.base import compact
from .errors import ContractError, InputError, ReplayError, SignatureError, TraceError, UncapturableError, add_note
from .options import Options
from .program import ALIVE as PROGRAMS
from .program import Pools, Program, RunOriginal
from .stages import Stages

ALIVE: weakref.WeakSet[GraphedCallable] = weakref.WeakSet()


class _Traced:
    """A trace and what runs its graph; ``program`` is None where the callable runs no tensor op."""

    __slots__ = ("call", "check", "program", "trace")

    def __init__(self, traced: trace.PythonTrace, program: Program | Stages | None, call: Callable[..., Any]) -> None:
        self.trace, self.program, self.call = traced, program, call
        self.check = traced.check

    @property
    def programs(self) -> list[Program]:
        """The captured parts."""
        return self.program.programs if self.program is not None else []


class GraphedCallable:
    """What stands in for a function, or for a module's ``forward``.

    Calls are answered by the first trace whose guards hold; a call that no trace answers is traced, run eagerly or
    refused, as ``options.on_new_signature`` says.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        options: Options,
        pools: Pools | None = None,
        name: str = "the callable",
        allow_unused: bool = True,
    ) -> None:
        self.original = original
        self.options, self.name, self.allow_unused = options, name, allow_unused
        self.pools = pools if pools is not None else Pools()
        self.function = as_function(original)
        self._bound_self = (self.function.__self__,) if isinstance(self.function, types.MethodType) else ()
        self._plain = self.function.__func__ if isinstance(self.function, types.MethodType) else self.function
        owner: Any = self._bound_self[0] if self._bound_self else None
        own = isinstance(owner, torch.nn.Module) and type(owner).forward is self._plain
        self._module = owner if own else None  # where it is the forward of a module's class
        self._freevars = self._plain.__code__.co_freevars
        self._read_signature()
        self._traced: list[_Traced] = []
        self._split: Callable[..., Any] | None = None
        self._break = ""  # why it is split
        self._looks: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._looks_to_capture: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._static_inputs: tuple[Any, ...] | None = None
        self._lock = threading.RLock()
        self.eager_reasons: collections.Counter[str] = collections.Counter()
        self.past_replays = 0  # of programs that have been dropped
        functools.update_wrapper(self, self._plain, updated=())
        if self._bound_self:
            self.__signature__ = inspect.signature(self.function)
        ALIVE.add(self)

    @dynamo.skipped
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # Part of what fxgraph reads, or torch.export; the rest of a torch.compile goes on around it.
            return self.original(*args, **kwargs) if dynamo.reads_inside() else _replayed(self, args, kwargs)
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if self._module is not None and type(self._module).forward is not self._plain:
            self._count_eager("the forward of its class is another one now")
            return type(self._module).forward(self._module, *args, **kwargs)
        if at_work := why_not_replay():
            self._count_eager(at_work)
            return self.original(*args, **kwargs)
        defaults = self._plain.__defaults__, self._plain.__kwdefaults__
        if defaults[0] is not self._defaults[0] or defaults[1] is not self._defaults[1]:
            self.release()  # traces have taken over the old ones
            self._read_signature()
        given = (*self._bound_self, *args) if self._bound_self else args
        names = self._locals(given, kwargs)
        if _has_any_global_hook():
            # Dynamo does not look at them, and a replay would skip them for every module inside.
            self._count_eager("hooks for all modules are registered (torch.nn.modules.module.register_module_*_hook)")
            return self.original(*args, **kwargs)
        for traced in self._traced:
            if traced.check(names):
                if traced is not self._traced[0]:
                    self._traced = [traced, *(other for other in self._traced if other is not traced)]
                try:
                    return traced.call(*given, **kwargs)
                except RunOriginal as error:
                    return self._run_failing(str(error), self._where(), args, kwargs)
                except Exception as error:  # the callable's own goes on
                    if not traced.trace.does_not_fit(error):
                        raise
        if self._looks_to_capture:
            self._capture_looks()
            return self(*args, **kwargs)
        return self._answer_new(args, kwargs, names)

    @property
    def static_inputs(self) -> tuple[Any, ...]:
        """The positional arguments of the last sample, with buffers in place of tensors that are read where they lie.

        A call with these very tensors has nothing to copy, so what produces the values (a data loader, another
        callable) may as well write them there. They are the user's: zeros at first, and nothing else writes them.

        Raises:
            ReplayError: ``no-static-inputs``, where nothing is captured that could read them.
        """
        with self._lock:
            if self._static_inputs is None:
                self._static_inputs = self._new_static_inputs()
            return self._static_inputs

    def _new_static_inputs(self) -> tuple[Any, ...]:
        if self._looks_to_capture:
            self._capture_looks()
        why = (
            "no sample was given" if not self._looks else "no capture fits the sample any more, or under this grad mode"
        )
        for look in self._looks[-1:]:
            args, kwargs = pytree.tree_map_only(TensorLook, TensorLook.make, look)
            buffers = {id(leaf) for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
            if self._break:
                why = f"it is captured in parts: {self._break}"
            names = self._locals((*self._bound_self, *args), kwargs)
            for traced in [traced for traced in self._traced if traced.check(names)]:
                if not isinstance(traced.program, Program):
                    why = "it is captured in parts, around ops that run eagerly"
                    continue
                inputs = traced.trace.flat_inputs(args, kwargs)
                why = traced.program.read_always(inputs, [i for i, value in enumerate(inputs) if id(value) in buffers])
                if not why:
                    result: tuple[Any, ...] = args
                    return result
        raise ReplayError(
            "no-static-inputs",
            f"{self.name} cannot read its inputs where they lie",
            where=self._where(),
            observed=why,
            expected="one capture of the whole callable, which changes no input in place",
            hint="call it with tensors of your own, which are copied",
        )

    @property
    def __code__(self) -> types.CodeType:
        """Of the original: torch.export asks a module's forward where it is written."""
        return self._plain.__code__

    @property
    def __globals__(self) -> dict[str, Any]:
        """For torch.jit.script, which asks a module's forward for it and would then ask for its source, in vain.

        Raises:
            AttributeError: always, as without this property, with what to do.
        """
        raise AttributeError(
            f"{self!r} is no Python function: to torch.jit.script give fxgraph.ungraph(module)", name="__globals__"
        )

    def __prepare_scriptable__(self) -> Callable[..., Any]:
        """What torch.jit.script compiles in place of a graphed function: the original."""
        return self.original

    def __repr__(self) -> str:
        captures = sum(len(program.captures) for program in self.programs())
        return f"<fxgraph graphed {self.name}: {captures} captures>"

    def programs(self) -> Iterator[Program]:
        """The programs of all traces."""
        return (program for traced in self._traced for program in traced.programs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Trace for these arguments and capture the forward; the result captures the backward.

        Raises:
            FxgraphError: whatever stands against it; see :mod:`fxgraph.errors`.
        """
        self._looks.append(pytree.tree_map_only(torch.Tensor, TensorLook.of, (args, kwargs)))
        with self._lock:
            try:
                traced = self._trace(args, kwargs)
            except TraceError as error:
                if error.id == "no-fake-impl":
                    raise
                # Only where the callable will probably raise, for this runs the user's Python.
                may_raise = error.id == "op-failed" or raises_itself(error)
                own = self._own_exception(args, kwargs) if may_raise else None
                if own is not None and error.id == "op-failed":
                    raise error.of_kind(own) from own
                if own is not None and raises_itself(error):
                    add_note(own, f"fxgraph: raised by {self.name} itself while it was traced; nothing was captured")
                    raise own from None
                self._cannot_trace(error, calls=0)
                return lambda: None
            self._add(traced)  # from here on `release` gives everything back
            if traced.program is None:
                return lambda: None
            prepared = traced.program.prepare(traced.trace.flat_inputs(args, kwargs))
            if prepared.differentiable and not self.allow_unused:
                self._refuse_unused(prepared.used, args, kwargs)
        return prepared.finish

    def _refuse_unused(self, used: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The inputs and parameters of the sample that require grad must have a gradient.

        Raises:
            ContractError: ``unused-input``, naming all that have none.
        """
        site = passes.CallSite(self.original, args, kwargs)
        wanted = {path: tensor for path, tensor in site.tensors() if tensor.requires_grad}
        unused = tuple(path for path, tensor in wanted.items() if id(tensor) not in used)
        subject = passes.DifferentiableInputs(tuple(wanted), unused, site.where())
        report = passes.judge(subject, passes.UNUSED_INPUT)
        if not report.ok:
            raise ContractError.from_report(report)

    def in_place(self) -> None:
        """It is where calls will find it."""
        for traced in self._traced:
            traced.trace.pass_over()

    def release(self) -> None:
        """Give up all traces and captures; the next call traces anew."""
        with self._lock:
            for program in self.programs():
                program.release()
            self._traced, self._static_inputs = [], None
            self.pools.trim()

    def _read_signature(self) -> None:
        self._defaults = self._plain.__defaults__, self._plain.__kwdefaults__
        self._bind = _binder(self._plain)

    def _locals(self, given: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The callable's local names for a call, as the guards see them; ``self`` is among what is given."""
        try:
            names = self._bind(*given, **kwargs)
        except TypeError as error:
            positional = len(given) - len(self._bound_self)
            raise InputError(
                "wrong-arguments",
                f"the arguments do not fit {self.name}",
                where=self._where(),
                observed=f"{positional} positional and {sorted(kwargs)} keyword arguments: {error}",
                expected=f"arguments for {self._plain.__name__}{inspect.signature(self.function)}",
                hint="call it as you would call the original",
            ) from error
        if self._freevars:
            for name, cell in zip(self._freevars, self._plain.__closure__ or (), strict=True):
                names[name] = cell.cell_contents
        return names

    def _answer_new(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: dict[str, Any]) -> Any:
        """A call that no trace answers."""
        if self._split is not None:
            return self._call_parts(self._split, args, kwargs)
        mode = self.options.on_new_signature
        if mode == "error":
            raise SignatureError(
                "new-signature",
                f"{self.name} was called in a way for which nothing is captured",
                where=self._where(),
                observed="; ".join(dict.fromkeys(traced.trace.why_not(names, args, kwargs) for traced in self._traced))
                or "no capture",
                expected="the shapes, dtypes, strides, devices, modes and Python state of a sample",
                hint="graph it with such a sample too, or use on_new_signature='capture' or 'eager'",
            )
        if mode == "eager":
            self._count_eager("a signature that no sample had")
            return self.original(*args, **kwargs)
        with self._lock:
            try:
                traced = self._trace(args, kwargs)
            except TraceError as error:
                return self._answer_untraceable(error, args, kwargs)
            self._add(traced)
        traced.trace.pass_over()
        try:
            return traced.call(*self._bound_self, *args, **kwargs)
        except RunOriginal as error:
            return self._run_failing(str(error), self._where(), args, kwargs)

    def _answer_untraceable(self, error: TraceError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if error.id == "op-failed":
            return self._run_failing(error.observed, error.where, args, kwargs)
        if raises_itself(error):
            try:
                return self.original(*args, **kwargs)
            except Exception as own:
                add_note(own, f"fxgraph: raised by {self.name} itself, which ran eagerly for this call")
                raise
        report = passes.judge(passes.CallSite(self.original, args, kwargs), passes.CONTRACT)
        if not report.ok:  # the arguments are to blame, so the callable stays as it is
            first = report.violations[0]
            self._count_eager(f"[{first.id}] {first.title}: {first.observed} ({first.where.path})")
            return self.original(*args, **kwargs)
        self._cannot_trace(error)
        if self._split is not None:
            return self._call_parts(self._split, args, kwargs)
        return self.original(*args, **kwargs)

    def _run_failing(self, observed: str, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call on which an op fails: eager decides.

        The callable may catch the error itself, or the op's fake implementation fails where its kernel does not.
        """
        try:
            result = self.original(*args, **kwargs)
        except Exception as own:
            raise TraceError(
                "op-failed",
                "an op of the callable fails on these inputs",
                where=where,
                observed=f"{type(own).__name__}: {trace.first_line(own)}" if str(own) else observed,
                expected="arguments on which the callable works in eager",
                hint="the cause is attached",
            ).of_kind(own) from own
        self._count_eager(f"[op-failed] {observed}" + (f" ({where})" if where else ""))
        return result

    def _call_parts(self, split: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with dynamo.in_parts():
                result = split(*args, **kwargs)
        except dynamo.ReadErrors as error:
            if not dynamo.op_failed(error):
                raise
            return self._run_failing(dynamo.failure_of_op(error), trace.user_line(error), args, kwargs)
        first = self._break not in self.eager_reasons
        self.eager_reasons[self._break] += 1
        if first and not self._captures_parts():
            fallback.warn(f"nothing of {self.name} is captured: {self._break}. {_NOTHING_AROUND}")
        return result

    def _captures_parts(self) -> bool:
        return any(p.captures for p in PROGRAMS if p.pools is self.pools and p.name.endswith(self.name))

    def _where(self) -> str:
        code = self._plain.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
        traced = self._read(args, kwargs)
        if traced.graph is None:
            return _Traced(traced, None, self._plain)
        judged = stages.Judged.of(traced.graph, self.options)
        report = judged.report
        # A graph that the user's passes have changed is what runs eagerly too, so its program takes it all the same.
        rewritten = self.options.passes and self.options.on_uncapturable == "eager"
        if not report.ok and not judged.eager and not rewritten:
            first = report.violations[0]
            raise TraceError(
                first.id,
                first.title,
                where=str(first.where),
                observed=first.observed,
                expected=first.expected,
                hint=first.hint,
                violations=tuple(report.violations),
            )
        program = stages.build(judged, traced.specs, self.options, self.name, self.pools)
        assert not isinstance(program, stages.EagerStage), "numbers are constants here"
        if isinstance(program, Program):
            program.alone = not self.options.passes
        # What is at work around a call has been asked when its guards are; the ops of stages may change it.
        return _Traced(traced, program, traced.bind(program.called if isinstance(program, Program) else program))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace.PythonTrace:
        """The callable's graph, from a callable that is alike if one is graphed together with this one."""
        if self.pools.plans is None:
            return self._read_anew(args, kwargs)
        known = self.pools.plans.read.setdefault(self._plain, [])
        names = self._locals((*self._bound_self, *args), kwargs) if known else {}
        for other in known:
            if (found := other.again(self.function, names, args, kwargs)) is not None:
                return found
        known.append(self._read_anew(args, kwargs))
        return known[-1]

    def _read_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace.PythonTrace:
        """The callable's graph; where data decides on sizes or numbers, with these as values in the graph."""
        try:
            return trace.read(self.function, args, kwargs)
        except TraceError as error:
            # Passes of the user's can only remove what is in the graph.
            into_the_graph = self.options.on_uncapturable == "split" or self.options.passes
            if not into_the_graph or error.id in ("op-failed", "no-fake-impl") or raises_itself(error):
                raise
            try:
                return trace.read(self.function, args, kwargs, **trace.DATA_IN_GRAPH)
            except TraceError:
                raise error from None

    def _add(self, traced: _Traced) -> None:
        kept = [traced, *self._traced]
        self._traced = kept[: self.options.max_captures]
        for oldest in kept[self.options.max_captures :]:
            for program in oldest.programs:
                program.release()
                self.past_replays += program.replays
                self.eager_reasons.update(program.eager_reasons)

    def _cannot_trace(self, error: TraceError, calls: int = 1) -> None:
        """Decide how to go on with a callable that does not fit into one graph."""
        if self.options.on_uncapturable == "error":
            raise UncapturableError(
                error.id,
                error.title,
                where=error.where,
                observed=error.observed,
                expected=error.expected,
                hint=error.hint,
                violations=error.violations,
            ) from error
        reason = f"[{error.id}] {error.observed}" + (f" ({error.where})" if error.where else "")
        if self.options.on_uncapturable == "eager":
            self._count_eager(reason, calls)
        elif self._split is None:
            from .backend import split_callable

            self._split, self._break = split_callable(self.function, self.options, self.pools, self.name), reason
            fallback.warn(f"{self.name} is captured in parts: {reason}")

    def _own_exception(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """What the callable itself raises on a sample that could not be traced, if it does.

        Parameters, buffers, the sample tensors and random generators are put back afterwards.
        """
        owners = [m for m in self._bound_self if isinstance(m, torch.nn.Module)]
        tensors = [t for m in owners for t in (*m.parameters(), *m.buffers())]
        tensors += [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        with torch.no_grad(), engines.for_tensors(tensors).unchanged(tensors):
            try:
                self.original(*args, **kwargs)
            except Exception as own:
                return own
        return None

    def _count_eager(self, reason: str, calls: int = 1) -> None:
        if reason not in self.eager_reasons:
            fallback.warn(f"{self.name} runs eagerly: {reason}")
        self.eager_reasons[reason] += calls

    def _capture_looks(self) -> None:
        """In a copy, at its first call: capture what the original had been given samples for."""
        looks, self._looks_to_capture = self._looks_to_capture, []
        for look in looks:
            args, kwargs = pytree.tree_map_only(TensorLook, TensorLook.make, look)
            with contextlib.suppress(Exception):  # the copied module may have changed since; the call itself will tell
                self.capture(args, kwargs)()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedCallable:
        return _rebuild(*copy.deepcopy(self._state(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._state()

    def _state(self) -> tuple[Any, ...]:
        # A module's own forward is named by its module: a copy is bound to the copied module.
        module = self._bound_self[0] if self._bound_self else None
        own = isinstance(module, torch.nn.Module) and self._plain is type(module).forward
        target = module if own else self.original
        return target, self.options, self.name, self.allow_unused, self._looks


@dataclasses.dataclass(frozen=True)
class TensorLook:
    """All of a sample tensor but its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLook:
        """The look of a tensor."""
        return cls(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> torch.Tensor:
        """Zeros of this look."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        compact(tensor).zero_()
        return tensor.requires_grad_(self.requires_grad)


def _rebuild(target: Any, options: Options, name: str, allow_unused: bool, looks: list[Any]) -> GraphedCallable:
    original = types.MethodType(type(target).forward, target) if isinstance(target, torch.nn.Module) else target
    graphed = GraphedCallable(original, options, None, name, allow_unused)
    graphed._looks, graphed._looks_to_capture = looks, list(looks)
    return graphed


@dynamo.outside_of_graphs(
    "a graphed callable replays between the graphs of torch.compile: give it fxgraph.ungraph(callable), to have that "
    "compiled with what is around it"
)
def _replayed(graphed: GraphedCallable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return graphed(*args, **kwargs)


_NOTHING_AROUND = (
    "After a break inside of a loop, a `with` or a `try` Dynamo does not go on in the same function: move the body "
    "into a function or module of its own, or what cannot be read out of it."
)


def _binder(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function that gives the local names for positional and keyword arguments, defaults included.

    It raises TypeError as the function does. For one of plain arguments it has the same parameters,
    ``lambda self, x, scale=default: {'self': self, 'x': x, 'scale': scale}``: Python itself binds the quickest.
    """
    signature = inspect.signature(function, follow_wrapped=False)

    def slowly(*args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    names = list(signature.parameters)
    kinds = {p.kind for p in signature.parameters.values()}
    if not (kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD} and all(map(str.isidentifier, names))):
        return slowly
    quickly: types.FunctionType = eval(
        f"lambda {', '.join(names)}: {{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    )
    quickly.__defaults__ = tuple([p.default for p in signature.parameters.values() if p.default is not p.empty])
    quickly.__qualname__ = function.__qualname__
    return quickly


def raises_itself(error: TraceError) -> bool:
    """Whether the callable could not be traced because it raises an exception of its own (or Dynamo has a fault)."""
    return error.__cause__ is not None and dynamo.fails_itself(error.__cause__)


def as_function(target: Callable[..., Any]) -> types.FunctionType | types.MethodType:
    """The Python function or bound method that runs when ``target`` is called.

    What is neither (a ``functools.partial``, an object with ``__call__``, a builtin) is wrapped into a function.
    """
    if isinstance(target, types.FunctionType):
        return target
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        return target
    method = inspect.getattr_static(type(target), "__call__", None)
    if isinstance(method, types.FunctionType) and not isinstance(target, torch.nn.Module):
        return types.MethodType(method, target)

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    return call


def original_of(target: Any) -> Callable[..., Any]:
    """What runs when ``target`` is called, without fxgraph."""
    if isinstance(target, torch.nn.Module):
        compile_now(target)
        current = target.__dict__.get("forward")
        return current.original if isinstance(current, GraphedCallable) else target.forward
    return target.original if isinstance(target, GraphedCallable) else target
