"""Dynamo's full-graph capture: ``torch._dynamo.convert_frame.fullgraph_capture`` and the guards it yields.

The same path serves ``torch.compile(...).aot_compile`` in torch itself. What comes out: an FX graph of torch-level
calls, the places in the user's objects where its inputs are found, guards over all Python state that was read, and
bytecode that finds the inputs, calls the graph, redoes the Python side effects and rebuilds the outputs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame, exc, guards
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from .tracing import forget_tensors, tracing

Unsupported = exc.Unsupported
"""Dynamo cannot read a piece of Python (a graph break)."""
OpFailed = exc.TorchRuntimeError
"""An op failed on the fake inputs, as it would on real ones."""
ReadErrors = (exc.TorchDynamoException,)

# Dynamo's defaults trade these checks for speed; a capture that outlives its assumptions would be silently wrong.
# rewrite_assert_with_torch_assert: an assert on a tensor becomes an op that raises another exception; on a GPU it
#     raises later, and ends the process's use of the GPU.
# record_runtime_overhead: a mark in profiles that costs each call as much as the guards.
# invalidate_compile_context_weakrefs: what Dynamo remembers of tensors by weak references goes when it has read; torch
#     swaps no tensor that has one (``torch.utils.swap_tensors``).
# allow_rnn: the reason for the default is the size of unrolled graphs in Inductor, which does not concern captured
#     kernels.
_UNSAFE = (
    "rewrite_assert_with_torch_assert",
    "skip_nnmodule_hook_guards",
    "skip_no_tensor_aliasing_guards_on_parameters",
    "skip_tensor_guards_with_matching_dict_tags",
)
_STRICT: dict[str, Any] = {
    **dict.fromkeys(_UNSAFE, False),
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "specialize_int": True,
    "specialize_float": True,
    "allow_rnn": True,
    "record_runtime_overhead": False,
    "invalidate_compile_context_weakrefs": True,
}

DATA_IN_GRAPH = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
"""Config under which sizes and numbers that depend on data are values in a graph instead of the end of it."""


@contextlib.contextmanager
def strict(**more: Any) -> Iterator[None]:
    """Dynamo with every guard on and static shapes; ``more`` are further ``torch._dynamo.config`` fields."""
    with torch._dynamo.config.patch({**_STRICT, **more}):
        yield


class Reading:
    """One reading of the user's Python.

    Attributes:
        graph: torch-level graph with one placeholder per tensor found, or None where no tensor op ran.
        sources: for each placeholder, the Python expression that finds it, such as ``L['self']._parameters['weight']``.
    """

    def __init__(self, function: types.FunctionType, capture: Any) -> None:
        backend_input = capture.backend_input
        self.graph: torch.fx.GraphModule | None = None
        self.sources: list[str] = []
        if backend_input is not None:
            self.graph = backend_input.graph_module
            self.sources = source_names(self.graph)
        with (
            get_metrics_context(),
            dynamo_timed("fxgraph_guards"),
            _tracing(backend_input),
            strict(),
            _unmeasured(),
            _modes_restored(),  # which are guarded too
        ):
            manager = capture.graph_capture_output.build_guards(function.__code__).guard_manager
        self.check: Callable[[dict[str, Any]], bool] = manager.check
        self._manager = manager
        # Of the capture only this is kept: the rest holds the tensors of the call that was read.
        self._environment: Any = None
        if backend_input is not None:
            self._backend_id: str = backend_input.backend_id
            self._environment = capture.graph_capture_output.get_runtime_env()
            self._globals = function.__globals__

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
        for name, value in made.__globals__.items():
            if name != self._backend_id:
                self._globals.setdefault(name, value)
        self._globals[own] = run_graph
        bound = types.FunctionType(code, self._globals, made.__name__, made.__defaults__, made.__closure__)
        bound.__kwdefaults__ = made.__kwdefaults__
        weakref.finalize(bound, self._globals.pop, own, None)
        return bound

    def why_not(self, local_names: dict[str, Any]) -> str:
        """The guards that fail, one per line."""
        parts = self._manager.check_verbose(local_names).verbose_code_parts
        return "\n".join(" ".join(str(part).split()) for part in parts)


_numbers = itertools.count()


@contextlib.contextmanager
def _unmeasured() -> Iterator[None]:
    """Dynamo flushes the caches and times each set of guards once that it builds, 20 ms for a line in its metrics."""
    original = vars(guards)["profile_guard_manager"]
    vars(guards)["profile_guard_manager"] = lambda *args: 0.0
    try:
        yield
    finally:
        vars(guards)["profile_guard_manager"] = original


@contextlib.contextmanager
def _undecomposed() -> Iterator[None]:
    """Ops that Dynamo takes apart, and that would round otherwise than eager's, stay whole."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    removed = {op: handlers.pop(op) for op in _TAKEN_APART if op in handlers}
    try:
        yield
    finally:
        handlers.update(removed)


_TAKEN_APART = (torch.addcdiv,)


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
        _undecomposed(),
    ):
        try:
            capture = convert_frame.fullgraph_capture(function, args, kwargs)
        except ReadErrors as error:
            _forget_reading(error)
            raise
        except Exception as error:
            _forget_reading(error)
            # A fault of Dynamo's own, of any type; its own entry (convert_frame.py) wraps all of them into this one
            # too.
            raise exc.InternalTorchDynamoError(f"{type(error).__name__}: {error}") from error
        if capture.backend_input is not None:
            refuse_miscompiled(capture.backend_input.graph_module)
        reading = Reading(plain, capture)
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


class Miscompiled(Exception):
    """Dynamo's graph is known to be wrong."""


def refuse_miscompiled(graph: torch.fx.GraphModule) -> None:
    """Refuse graphs that this version of Dynamo gets wrong in silence.

    Before torch 2.13, a ``torch.autograd.Function`` that is given one tensor as two arguments loses a gradient (PyTorch
    issue 183604; seen on 2.11.0, right on 2.13.0). The graph does not show which calls are concerned, so all of them
    are refused. In all versions (up to 2.13.0) ``set_materialize_grads(False)`` is lost, which the graph does not show
    either; it concerns functions with several outputs.

    Raises:
        Miscompiled: if there is such a node.
    """
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply)
    for node in nodes:
        if len(pytree.tree_leaves(node.meta.get("example_value"))) > 1:
            raise Miscompiled(
                "a torch.autograd.Function with several outputs: where it calls set_materialize_grads(False), Dynamo "
                "would give it zeros for gradients that are None"
            )
    if nodes and TorchVersion(torch.__version__) < "2.13":
        raise Miscompiled(
            "a torch.autograd.Function, whose gradients Dynamo gets wrong in some cases before torch 2.13"
        )


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
    """In a backend: have Dynamo trace the frame once more if it skips guards, or turns asserts into ops.

    A backend is called when the frame has been traced, which is too late for the settings that decide what is guarded.
    So they are changed, Dynamo starts the frame again, and :func:`release_guards` puts them back at the first call of
    what was compiled, when the guards have been built.

    Raises:
        TensorifyScalarRestartAnalysis: the restart that Dynamo lets a backend ask for.
    """
    skipped = [name for name in _UNSAFE if getattr(torch._dynamo.config, name)]
    if not skipped or torch._guards.CompileContext.try_get() is None:
        return
    for name in skipped:
        setattr(torch._dynamo.config, name, False)
        _loosened[name] = True
    raise exc.TensorifyScalarRestartAnalysis(restart_reason="fxgraph needs every guard and assert")


def release_guards() -> None:
    """Put back what :func:`demand_all_guards` has changed."""
    while _loosened:
        name, value = _loosened.popitem()
        setattr(torch._dynamo.config, name, value)
