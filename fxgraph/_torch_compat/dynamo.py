"""Dynamo's full-graph capture: ``torch._dynamo.convert_frame.fullgraph_capture`` and the guards it yields.

The same path serves ``torch.compile(...).aot_compile`` in torch itself. What comes out: an FX graph of torch-level
calls, the places in the user's objects where its inputs are found, guards over all Python state that was read, and
bytecode that finds the inputs, calls the graph, redoes the Python side effects and rebuilds the outputs.

Note [What guards cost]

Dynamo's guards are a tree that is walked at every call. On a model of many small modules that is most of what a call
costs, and more so in a training loop, where the tree has left the processor's caches since the last call. Two things
are done about it.

* Parameters and buffers that the graph takes are not in the tree. The bytecode finds them anyway; one call in C++ then
  compares all of them just before the graph would run (``TensorGuards``: the checks of ``TENSOR_MATCH``, and that no
  two are the same tensor). Where the bytecode does not even find one, the guards do not hold either.
* From Python 3.12 on Dynamo passes over modules whose dictionaries nobody has written since it last looked
  (``PyDict_Watch``; before, it compares addresses that may dangle, so torch 2.13 has that off). What it does not see is
  compared here: tensors, as said, and the classes of modules. Functions may be given other defaults: they are never
  passed over. Once a dictionary that was looked at has been written, nothing below its root is passed over any more,
  so the first look, which Dynamo itself takes when it builds guards, has to come after the graphed ``forward`` has been
  set (:meth:`Reading.pass_over`).

What is added to the tree is in ``dynamo_guards.py``.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import itertools
import operator
import os
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch._C._dynamo import eval_frame
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo import convert_frame, exc, guards, trace_rules
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from torch.torch_version import TorchVersion

from .dynamo_data import let_numbers_vary, read_as_values
from .dynamo_faults import NumpyOnData, refuse_miscompiled
from .dynamo_guards import look_closer, see_what_hides
from .fake_impls import as_kernels_do
from .tracing import forget_tensors, tracing

Unsupported = exc.Unsupported
"""Dynamo cannot read a piece of Python (a graph break)."""
OpFailed = exc.TorchRuntimeError
"""An op failed on the fake inputs, as it would on real ones."""
ReadErrors = (exc.TorchDynamoException,)

_PASSES_OVER = "use_recursive_dict_tags_for_guards"

# Dynamo's defaults trade these checks for speed; a capture that outlives its assumptions would be silently wrong.
# rewrite_assert_with_torch_assert: an assert on a tensor becomes an op that raises another exception; on a GPU it
#     raises later, and ends the process's use of the GPU.
# record_runtime_overhead: a mark in profiles that costs each call as much as the guards.
# enable_dynamo_decompositions: operators with a number (``add_`` with alpha, ``addcdiv`` with value) are taken apart,
#     which rounds otherwise. Without it a tensor in place of the number is read on the host, as in eager.
# invalidate_compile_context_weakrefs: what Dynamo remembers of tensors by weak references goes when it has read; torch
#     swaps no tensor that has one (``torch.utils.swap_tensors``).
# use_numpy_random_stream: numpy's random numbers would be drawn by torch.
# allow_rnn: the reason for the default is the size of unrolled graphs in Inductor, which does not concern captured
#     kernels.
_UNSAFE = (
    "assume_dunder_attributes_remain_unchanged",
    "enable_dynamo_decompositions",
    "skip_guards_on_constant_func_defaults",
    "rewrite_assert_with_torch_assert",
    "skip_nnmodule_hook_guards",
    "skip_no_tensor_aliasing_guards_on_parameters",
    "skip_tensor_guards_with_matching_dict_tags",
)
_STRICT: dict[str, Any] = {
    **dict.fromkeys(_UNSAFE, False),
    # See Note [What guards cost].
    _PASSES_OVER: sys.version_info >= (3, 12),
    "max_saved_pointers_for_recursive_dict_tags_check": sys.maxsize,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "specialize_int": True,
    "specialize_float": True,
    "allow_rnn": True,
    "record_runtime_overhead": False,
    "invalidate_compile_context_weakrefs": True,
    "use_numpy_random_stream": True,
}

DATA_IN_GRAPH = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
"""Config under which sizes and numbers that depend on data are values in a graph instead of the end of it."""


@functools.cache
def _handlers_ask() -> None:
    """Have two handlers of Dynamo's ask ``enable_dynamo_decompositions`` first, as others that take an op apart do."""

    def asking(decompose: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decompose)
        def handler(*args: Any, **kwargs: Any) -> Any:
            return decompose(*args, **kwargs) if torch._dynamo.config.enable_dynamo_decompositions else None

        return handler

    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers.update({op: asking(handlers[op]) for op in (torch.addcdiv, torch._foreach_lerp_) if op in handlers})


_TORCH_MODULES = os.path.dirname(torch.nn.modules.__file__) + os.sep
_parts = threading.local()


def _read_torch_modules() -> None:
    """Have Dynamo read the forwards of torch's own modules while :func:`in_parts` is on.

    It inlines them into what it reads, but does not begin with one: after a break in a loop over such modules nothing
    of them would be captured.
    """
    original = trace_rules.check

    @functools.wraps(original)
    def check(obj: Any, *args: Any, **kwargs: Any) -> bool:
        if _in_parts() and isinstance(obj, types.CodeType) and obj.co_name == "forward":
            inlined = args[0] if args else kwargs.get("is_inlined_call", False)
            if not inlined and obj.co_filename.startswith(_TORCH_MODULES):
                return False
        return bool(original(obj, *args, **kwargs))

    trace_rules.check = check


_read_torch_modules()


def _in_parts() -> bool:
    return getattr(_parts, "on", False)


let_numbers_vary(_in_parts)


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """For calls of what is captured in parts.

    Dynamo reads strictly, and forwards of torch's own modules that run in frames of their own, too. numpy's functions
    end a graph, and numbers that change from call to call enter it.
    """
    before, _parts.on = _in_parts(), True
    try:
        with strict(trace_numpy=False, specialize_float=False, specialize_int=False):
            yield
    finally:
        _parts.on = before


@contextlib.contextmanager
def strict(**more: Any) -> Iterator[None]:
    """Dynamo with every guard on, static shapes and ops as they are; ``more`` are further ``torch._dynamo.config``
    fields."""
    _handlers_ask()
    with torch._dynamo.config.patch({**_STRICT, **more}):
        yield


def _runtime_environment(capture: Any, function: types.FunctionType) -> Any:
    """What the bytecode needs, without the builtins that it names: a function has those without being given them.

    Before torch 2.13 they would count as missing, later they would come to lie among the function's globals.
    """
    environment = capture.graph_capture_output.get_runtime_env()
    builtin: dict[str, Any] = operator.attrgetter("__builtins__")(function)  # not all stubs have it
    for name in (environment.external_refs & builtin.keys()) - function.__globals__.keys():
        environment.external_refs.discard(name)
        environment.used_globals.pop(name, None)
    return environment


class Reading:
    """One reading of the user's Python.

    Attributes:
        graph: torch-level graph with one placeholder per tensor found, or None where no tensor op ran.
        sources: for each placeholder, the Python expression that finds it, such as ``L['self']._parameters['weight']``.
    """

    def __init__(self, function: types.FunctionType, capture: Any, names: Iterable[str] = ()) -> None:
        backend_input = capture.backend_input
        self.graph: torch.fx.GraphModule | None = None
        self.sources: list[str] = []
        output_graph = capture.graph_capture_output.output_graph
        self._modules = _guarded(output_graph, ("TYPE_MATCH",))
        if backend_input is not None:
            self.graph = backend_input.graph_module
            self.sources = source_names(self.graph)
            see_what_hides(output_graph.guards, self.graph)
            at_once = {source for source in self.sources if is_parameter(source) or is_buffer(source)}
            output_graph.guards.inner = {
                guard
                for guard in output_graph.guards.inner
                if not (guard.create_fn_name() == "TENSOR_MATCH" and guard.name in at_once)
            }
        look_closer(output_graph.guards, capture.graph_capture_output.traced_code)
        with (
            get_metrics_context(),
            dynamo_timed("fxgraph_guards"),
            _tracing(backend_input),
            strict(**{_PASSES_OVER: False}),
            _unmeasured(),
            _modes_restored(),  # which are guarded too
        ):
            manager = capture.graph_capture_output.build_guards(function.__code__).guard_manager
        self._manager = manager
        self._globals = function.__globals__
        self._global_scope = output_graph.global_scope
        self._constants = self._texts(_guarded(output_graph, _COMPARED), output_graph.local_scope)
        # Whether the guards hold for these local names, as far as can be said before the graph's inputs are found.
        self.check = self._check_for(output_graph.local_scope)
        self._tensors: tuple[list[int], Any] | None = None
        self._calls_graph_at: dict[types.CodeType, int] = {}  # offset in the bytecode of what `bind` has given
        # Of the capture only this is kept: the rest holds the tensors of the call that was read.
        self._environment: Any = None
        # Dynamo leaves names in the globals of the function, for as long as what it has compiled lives.
        self._names = _Names()
        weakref.finalize(self._names, _remove, function.__globals__, names).atexit = False
        if backend_input is not None:
            self._backend_id: str = backend_input.backend_id
            function.__globals__.pop(self._backend_id, None)  # `bind` gives each function one of its own
            self._environment = _runtime_environment(capture, function)

    def _values(self, names: Iterable[str], local_names: dict[str, Any]) -> list[Any]:
        scope = {"L": local_names, "G": self._global_scope}
        return [eval(name, scope) for name in names if _PATH.fullmatch(name)]  # Dynamo's own expressions

    def _texts(self, names: Sequence[str], local_names: dict[str, Any]) -> dict[str, tuple[type, str]] | None:
        """Constants as texts; None where some of them are found in ways that only Dynamo knows."""
        values = self._values(names, local_names)
        if len(values) < len(names):
            return None
        return {name: (type(value), repr(value)) for name, value in zip(names, values, strict=True)}

    def _check_for(self, local_names: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
        values = self._values(self._modules, local_names)
        modules = [value for value in values if isinstance(value, torch.nn.Module)]
        check: Callable[[dict[str, Any]], bool] = self._manager.check
        return _with_classes(check, modules) if modules else check

    def again(self, local_names: dict[str, Any]) -> Reading | None:
        """What reading the same function for these would give; None where it might be something else.

        As ``torch.compile`` does with the instances of a class. The inputs are to be looked at and watched.
        """
        if self.graph is None or self.graph.graph.find_nodes(op="get_attr") or not self._manager.check(local_names):
            return None
        if self._constants is None or self._texts(list(self._constants), local_names) != self._constants:
            return None  # 0.0 and -0.0 are equal for a guard
        other = copy.copy(self)
        other.check, other._tensors = other._check_for(local_names), None
        return other

    def pass_over(self) -> None:
        """From now on, modules that nobody has written since the guards looked at them are passed over."""
        if _STRICT[_PASSES_OVER]:
            with strict():  # which says that functions are not
                self._manager.find_tag_safe_roots()

    def watch(self, inputs: Sequence[Any]) -> None:
        """From now on the graph's inputs have to look like these."""
        places = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        tensors = [inputs[i] for i in places]
        self._static = [vars(tensor).get(_STATIC) for tensor in tensors]
        sizes, strides = [list(t.size()) for t in tensors], [list(t.stride()) for t in tensors]
        self._tensors = (
            places,
            TensorGuards(
                *tensors,
                dynamic_dims_sizes=sizes,  # type: ignore[arg-type]  # of each tensor (guards.cpp); the stub has one's
                dynamic_dims_strides=strides,  # type: ignore[arg-type]  # likewise
            ),
        )

    def mark(self, inputs: Sequence[Any]) -> None:
        """Mark inputs as reading marks those of modules, and has marked those that are watched."""
        for i, mark in zip(self._watched()[0], self._static, strict=True):
            if mark is not None and _STATIC not in vars(inputs[i]):
                torch._dynamo.mark_static_address(inputs[i], guard=mark == "guarded")

    def why_not_inputs(self, inputs: Sequence[Any]) -> str:
        """Which of these inputs does not look like those that are watched."""
        places, tensors = self._watched()
        names = [self.sources[i] for i in places]
        found = tensors.check_verbose(*[inputs[i] for i in places], tensor_check_names=names)
        return "" if found is True else str(found)

    def _watched(self) -> tuple[list[int], Any]:
        assert self._tensors is not None, "watch() comes first"
        return self._tensors

    def checked(self, run_graph: Callable[..., Any]) -> Callable[..., Any]:
        """``run_graph`` for inputs that look like those that are watched.

        Raises:
            GuardsFailed: by the function, for others.
        """
        places, tensors = self._watched()
        if not places:
            return run_graph
        check, all_of_them = tensors.check, places == list(range(len(self.sources)))

        def run(*inputs: Any) -> Any:
            if not (check(*inputs) if all_of_them else check(*[inputs[i] for i in places])):
                raise GuardsFailed
            return run_graph(*inputs)

        return run

    def does_not_fit(self, error: BaseException) -> bool:
        """Whether a function that :meth:`bind` gave has raised this because the guards do not hold.

        So it is where an input differs, and where there is none: the bytecode failed before it came to the graph.
        """
        if isinstance(error, GuardsFailed):
            return True
        step = error.__traceback__
        while step is not None and step.tb_frame.f_code not in self._calls_graph_at:
            step = step.tb_next
        return step is not None and step.tb_lasti < self._calls_graph_at[step.tb_frame.f_code]

    def bind(self, run_graph: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the original's arguments (``self`` first for methods) that calls ``run_graph`` for the
        graph.

        It reads and writes the original's own globals. What Dynamo's bytecode needs beside them is put there, as
        ``torch.compile`` does; ``run_graph`` under a name of this function's own, for as long as it lives.
        """
        made = self._environment.forward_callable(self._backend_id, run_graph, extra_globals=self._globals)
        own = f"{self._backend_id}_{next(_numbers)}"
        code = made.__code__
        code = code.replace(co_names=tuple(own if name == self._backend_id else name for name in code.co_names))
        self._calls_graph_at[code] = _offset_of_call(code, own)
        for name, value in made.__globals__.items():
            if name != self._backend_id:
                self._globals.setdefault(name, value)
        bound = types.FunctionType(code, self._globals, made.__name__, made.__defaults__, made.__closure__)
        # Held by the function, not by the globals: so all goes at once when nothing else holds the function.
        vars(bound)["run_graph"], vars(bound)["names"] = run_graph, self._names
        self._globals[own] = weakref.proxy(run_graph)
        bound.__kwdefaults__ = made.__kwdefaults__
        weakref.finalize(bound, self._globals.pop, own, None)
        weakref.finalize(bound, self._calls_graph_at.pop, code, None)
        return bound

    def why_not(self, local_names: dict[str, Any]) -> str:
        """The guards that fail, one per line."""
        parts = self._manager.check_verbose(local_names).verbose_code_parts
        return "\n".join(" ".join(str(part).split()) for part in parts)


class _Names:
    """Those that a reading has put into a module. They are there while something may need them."""


def _own_names(scope: dict[str, Any], before: set[str]) -> list[str]:
    """Names that a reading has put into a module for itself; those of modules that it imports are everybody's."""
    return [name for name in scope if name not in before and name.startswith("__") and not name.startswith("__import_")]


def _remove(scope: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        scope.pop(name, None)


_numbers = itertools.count()
_STATIC = "_dynamo_static_input_type"


class GuardsFailed(Exception):
    """An input of a graph is not what the graph was read for."""


def is_parameter(source: str) -> bool:
    """Whether a source is that of a module's parameter."""
    return "._parameters[" in source


def is_buffer(source: str) -> bool:
    """Whether a source is that of a module's buffer."""
    return "._buffers[" in source


def _with_classes(
    check: Callable[[dict[str, Any]], bool], modules: list[torch.nn.Module]
) -> Callable[[dict[str, Any]], bool]:
    """The check, and that modules have the classes that they had, and these the forwards: Dynamo guards no forward."""
    then = list(map(type, modules))
    classes, forward = list(dict.fromkeys(then)), operator.attrgetter("forward")
    forwards = list(map(forward, classes))
    if not _STRICT[_PASSES_OVER]:  # the guards look at the classes themselves
        return lambda local_names: list(map(forward, classes)) == forwards and check(local_names)
    return lambda local_names: (
        list(map(type, modules)) == then and list(map(forward, classes)) == forwards and check(local_names)
    )


def _offset_of_call(code: types.CodeType, name: str) -> int:
    """Where a global function is called, once, in bytecode without jumps before that."""
    steps = itertools.dropwhile(lambda step: step.argval != name, dis.get_instructions(code))
    depth = 0
    for step in steps:
        depth += dis.stack_effect(step.opcode, step.arg)
        if step.opname.startswith("CALL") and depth == 1:  # the function and its arguments have become the result
            return step.offset
    raise AssertionError(f"{name} is not called")


def _guarded(output_graph: Any, kinds: Sequence[str]) -> list[str]:
    """Expressions of the objects that have a guard of these kinds."""
    return sorted({guard.name for guard in output_graph.guards.inner if guard.create_fn_name() in kinds})


_COMPARED = ("CONSTANT_MATCH", "EQUALS_MATCH")
_PATH = re.compile(r"[LG]\[[^\]]+\](?:\.\w+|\[[^\]]+\])*")


@contextlib.contextmanager
def _unmeasured() -> Iterator[None]:
    """Dynamo flushes the caches and times each set of guards once that it builds, 20 ms for a line in its metrics."""
    original = vars(guards)["profile_guard_manager"]
    vars(guards)["profile_guard_manager"] = lambda *args: 0.0
    try:
        yield
    finally:
        vars(guards)["profile_guard_manager"] = original


def _tracing(backend_input: Any) -> contextlib.AbstractContextManager[Any]:
    if backend_input is None:
        return contextlib.nullcontext()
    return torch._guards.tracing(torch._guards.TracingContext(backend_input.fake_mode))


def read(
    function: types.FunctionType | types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any], **config: Any
) -> Reading:
    """Read one call of a Python function or bound method into a graph.

    Raises:
        Unsupported: a piece of Python that does not fit into one graph.
        OpFailed: an op that fails on these inputs.
        Miscompiled: see :func:`refuse_miscompiled`.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    assert isinstance(plain, types.FunctionType), f"read() got a {type(plain).__name__}"
    with (
        tracing(),
        _marked(),
        strict(**config),
        get_metrics_context(),
        dynamo_timed("fxgraph_read"),
        _modes_cleared(),
        _quiet_backends(),
        as_kernels_do(),
        read_as_values(),
    ):
        before = set(plain.__globals__)
        try:
            capture = convert_frame.fullgraph_capture(function, args, kwargs)
        except Exception as error:
            _forget_reading(error)
            _remove(plain.__globals__, _own_names(plain.__globals__, before))
            if isinstance(error, ReadErrors):
                raise
            # A fault of Dynamo's own, of any type; its own entry (convert_frame.py) wraps all of them into this one
            # too.
            raise exc.InternalTorchDynamoError(f"{type(error).__name__}: {error}") from error
        if capture.backend_input is not None:
            refuse_miscompiled(capture.backend_input.graph_module)
        reading = Reading(plain, capture, _own_names(plain.__globals__, before))
        if capture.backend_input is not None:
            forget_tensors(node.meta.get("example_value") for node in capture.backend_input.graph_module.graph.nodes)
        return reading


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    global _reading
    before, _reading = _reading, True
    try:
        yield
    finally:
        _reading = before


def _forget_reading(error: BaseException) -> None:
    """What Dynamo leaves of a reading that failed holds weak references to its tensors: see :func:`forget_tensors`."""
    tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)
    output_graph = getattr(tracer_output, "output_graph_for_cleanup", None)
    if output_graph is not None:
        output_graph.tracing_context.tensor_to_context.clear()
        forget_tensors(node.meta.get("example_value") for node in output_graph.graph.nodes)


def read_until(error: BaseException) -> torch.fx.GraphModule | None:
    """What :func:`read` had read when it gave up with ``error``: a graph that returns nothing; None where it has none.

    Its placeholders need not be all of the call's tensors, and it is not to be run.
    """
    tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)
    output_graph = getattr(tracer_output, "output_graph_for_cleanup", None)
    if output_graph is None:
        return None
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(output_graph.graph, {}) or ())
    return torch.fx.GraphModule(dict(output_graph.nn_modules), graph)


QUIET: dict[str, Any] = {"reorderable_logging_functions": {print, warnings.warn}}
"""For :func:`read`: what writes for a person to read is passed over."""


# Dynamo reads with the function modes (torch.set_default_device is one) taken off, and finds them in a manager. From
# torch 2.12 on its callers enter that manager, before it does so itself; entered twice it forgets them.
_ENTERS_ITSELF = TorchVersion(torch.__version__) < "2.12"


def _modes_cleared() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if _ENTERS_ITSELF else torch_function_mode_stack_state_mgr


def _modes_restored() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if _ENTERS_ITSELF else torch_function_mode_stack_state_mgr.temp_restore_stack()


@contextlib.contextmanager
def _quiet_backends() -> Iterator[None]:
    """Dynamo's frame hook stays out of the code that runs while we trace."""
    before = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


def reason(error: BaseException) -> str:
    """What Dynamo could not read, in one line: the kind, and the object that it was about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = next((line.partition(":")[2].strip() for line in lines if line.startswith(_CONTEXT)), "")
    return (lines[0] if lines else type(error).__name__) + (f": {context}" if context else "")


def fails_itself(error: BaseException) -> bool:
    """Whether the reason lies in this one call: the callable raises an exception of its own, or Dynamo has a fault."""
    return isinstance(error, exc.InternalTorchDynamoError) or reason(error).startswith("Observed exception")


def broken_rule(error: BaseException) -> str | None:
    """The id of the rule on captures that a piece of Python breaks at which Dynamo stopped, or None if it is none."""
    if isinstance(error, NumpyOnData) or "data-dependent expression" in str(error):
        return "host-sync"
    said = str(getattr(error, "gb_type", ""))
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound)):
            return "host-sync"
        cause = cause.__cause__
    return next((rule for rule, kinds in _KINDS.items() if said.startswith(kinds)), None)


# How ``gb_type`` of Dynamo's errors begins, by the rule that eager's doing breaks.
_KINDS = {
    "host-sync": (
        "Data dependent operator",
        "Data-dependent branching",
        "Data-dependent assertion",
        "Indexing list with non-scalar tensor",
        "Tensor.tolist()",
        "Tensor.numpy()",
        "Unsupported Tensor.item() call",
    ),
    "data-dependent-shape": ("Dynamic shape operator", "Attempted to use `torch.nn.functional.one_hot`"),
}


def op_failed(error: BaseException) -> bool:
    """Whether an op failed on fake inputs, as it would on real ones."""
    return isinstance(error, OpFailed) or str(getattr(error, "gb_type", "")).endswith("when making fake tensor call")


def failure_of_op(error: BaseException) -> str:
    """The op's own words in an error for which :func:`op_failed` holds."""
    while error.__cause__ is not None:
        error = error.__cause__
    if not isinstance(error, ReadErrors):
        return f"{type(error).__name__}: {error}".splitlines()[0]
    text = " ".join(str(error).split())
    found = re.search(r": got (\w+\(.*?\)) (?:Hint:|Developer debug context:|from user code:|$)", text)
    return found.group(1) if found else reason(error)


def op_without_fake(error: BaseException) -> str | None:
    """The op without a fake implementation that stopped Dynamo, or None if something else did."""
    if getattr(error, "gb_type", None) == "Operator does not support running with fake tensors":
        return reason(error).rpartition("unsupported operator: ")[2]
    custom = re.search(r"no fake impl registered for <CustomOpDef\((.*?)\)>", str(error))
    return custom.group(1) if custom else None


_CONTEXT = "Developer debug context"


def source_names(graph: torch.fx.GraphModule) -> list[str]:
    """For each placeholder of a graph of Dynamo's, the Python expression that finds it."""
    names = []
    for node in graph.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        names.append(name() if callable(name) else name)
    return names


Function = TypeVar("Function", bound=Callable[..., Any])


def skipped(function: Function) -> Function:
    """Where Dynamo does not read this function as a part of another one, it runs it, and what it calls, as it is."""
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def never_read(function: Function) -> Function:
    """Dynamo and compiled autograd run this function, and what it calls, as it is.

    ``torch.compiler.disable`` does the same by a wrapper that costs each call some microseconds; this marks the code.
    """
    vars(function)["_torchdynamo_disable"] = True
    return skipped(function)


def outside_of_graphs(reason: str) -> Callable[[Function], Function]:
    """Dynamo ends its graph at a call of this function; the reason is what it says where it may not."""
    disable: Callable[[Function], Function] = torch.compiler.disable(reason=reason)
    return disable


_reading = False  # under the lock of tracing()


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it bare
def reads_inside() -> bool:
    """In code that Dynamo reads: whether it is :func:`read` or ``torch.export`` that has it read."""
    return _reading or torch.compiler.is_exporting()


SkipFrame = exc.SkipFrame
"""A backend raises it to have Dynamo run the frame eagerly."""


_loosened: dict[str, bool] = {}


def demand_all_guards() -> None:
    """In a backend: have Dynamo trace the frame once more if it skips guards, or turns asserts or ops into other ops.

    A backend is called when the frame has been traced, which is too late for the settings that decide what is guarded.
    So they are changed, Dynamo starts the frame again, and :func:`release_guards` puts them back at the first call of
    what was compiled, when the guards have been built.

    Raises:
        TensorifyScalarRestartAnalysis: the restart that Dynamo lets a backend ask for.
    """
    skipped = [name for name in _UNSAFE if getattr(torch._dynamo.config, name)]
    if not skipped or torch._guards.CompileContext.try_get() is None:
        return
    _handlers_ask()
    for name in skipped:
        setattr(torch._dynamo.config, name, False)
        _loosened[name] = True
    InstructionTranslator.current_tx().speculation_log.clear()  # it would miss the Python of what was taken apart
    raise exc.TensorifyScalarRestartAnalysis(restart_reason="fxgraph needs every guard, assert and operator")


def release_guards() -> None:
    """Put back what :func:`demand_all_guards` has changed."""
    while _loosened:
        name, value = _loosened.popitem()
        setattr(torch._dynamo.config, name, value)
