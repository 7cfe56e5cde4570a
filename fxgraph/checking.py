"""``fxgraph.check``: everything that stands against a capture, before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import passes

from . import trace
from .errors import TraceError
from .graphed import as_function, original_of, raises_itself


def check(
    callable: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> passes.Report:
    """Everything that stands against capturing a callable for these arguments. Nothing is captured, no GPU is needed.

    The rules on the callable and its arguments come first; only if they hold is the callable traced and its graph
    judged. Where its Python does not fit into one graph, what comes before the piece at which reading ends is judged
    too, and what comes after it if all that it does is to print or warn.

    Args:
        callable: a function, ``nn.Module`` or graphed callable.
        args, kwargs: the arguments of one call.
    Returns:
        A report: ``report.ok``, ``report.violations`` (each with ``id``, ``where``, ``observed``, ``expected``,
        ``hint``), and ``str(report)`` for a person.
    """
    kwargs = {} if kwargs is None else kwargs
    args = (args,) if isinstance(args, torch.Tensor) else args  # as in make_graphed_callables
    report = passes.check_call(callable, args, kwargs)
    if not report.ok:
        return report
    function = as_function(original_of(callable))
    try:
        traced = trace.read(function, args, kwargs, **trace.DATA_IN_GRAPH)
    except TraceError as error:
        return report + _judge_parts(function, args, kwargs, error)
    return report + _judge_whole(traced, args, kwargs)


def _judge_whole(traced: trace.PythonTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> passes.Report:
    if traced.graph is None:
        return passes.Report()
    report = trace.check_torch_level(traced.graph)
    if not report.ok:  # what depends on data has no joint graph
        return report
    try:
        joint = trace.export(traced.graph, traced.specs, traced.flat_inputs(args, kwargs))
    except TraceError as error:
        return _judge_error(error)
    return passes.check(joint.gm)


def _judge_error(error: TraceError) -> passes.Report:
    """The rule that tracing found broken: one of its own, or one on captures."""
    for rule in passes.CAPTURABLE:
        if rule.id == error.id:
            hint = f"{error.hint}; {_WHAT_COMES_AFTER}"
            return passes.Report((rule.violation(_place(error), error.observed, error.expected, hint),))
    return passes.judge(error, TRACE_RULES)


def _place(error: TraceError) -> passes.Where:
    file, _, rest = error.where.partition(":")
    line = rest.split(" ")[0]
    return passes.Where(file=file or None, line=int(line) if line.isdigit() else None)


def _judge_parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError) -> passes.Report:
    """What stands before the piece of Python at which reading ended, that piece, and, if it only writes for a person to
    read, what comes behind it.
    """
    before = trace.read_until(error)
    report = passes.Report() if before is None else trace.check_torch_level(before)
    # The op at which reading ended may be in the graph already.
    named = {(one.id, one.where.file, one.where.line) for one in report.violations}
    found = _judge_error(error).violations
    report += passes.Report(tuple(one for one in found if (one.id, one.where.file, one.where.line) not in named))
    if error.id != "untraceable":
        return report
    try:
        more = _judge_whole(trace.read(function, args, kwargs, **trace.DATA_IN_GRAPH, **trace.QUIET), args, kwargs)
    except TraceError as second:
        before = trace.read_until(second)
        more = passes.Report() if before is None else trace.check_torch_level(before)
        if not raises_itself(second):
            more += _judge_error(second)
    known = set(map(str, report.violations))
    return report + passes.Report(tuple(one for one in more.violations if str(one) not in known))


_WHAT_COMES_AFTER = (
    "to know what comes after it, it has to be run: torch._dynamo.explain(callable)(*args) does, and lists all such "
    "pieces"
)


@dataclass(frozen=True)
class TraceRule(passes.Constraint[TraceError]):
    """A rule that tracing itself judges: the subject is the error with which it gave up."""

    expected: ClassVar[str]

    def violations(self, subject: TraceError) -> Iterator[passes.Violation]:
        if subject.id == self.id:
            yield self.violation(_place(subject), subject.observed, self.expected)


@dataclass(frozen=True)
class Untraceable(TraceRule):
    """All of the callable's Python fits into one graph."""

    id: ClassVar[str] = "untraceable"
    title: ClassVar[str] = "the callable's Python does not fit into one graph"
    why: ClassVar[str] = "a replay runs no Python, so a branch or side effect that depends on data has no place in it"
    hint: ClassVar[str] = (
        "move this piece out of the callable, or leave on_uncapturable='split' to capture around it; "
        f"{_WHAT_COMES_AFTER}"
    )
    expected: ClassVar[str] = "Python whose course depends on shapes and constants only"


@dataclass(frozen=True)
class OpFailed(TraceRule):
    """Every op works on the given shapes, dtypes and devices."""

    id: ClassVar[str] = "op-failed"
    title: ClassVar[str] = "an op of the callable fails on these inputs"
    why: ClassVar[str] = "what fails in eager has no graph"
    hint: ClassVar[str] = trace.IF_IT_WORKS_IN_EAGER
    expected: ClassVar[str] = "arguments on which the callable works in eager"


@dataclass(frozen=True)
class NoFakeImpl(TraceRule):
    """Every op can be run on fake tensors."""

    id: ClassVar[str] = "no-fake-impl"
    title: ClassVar[str] = "an op has no fake implementation"
    why: ClassVar[str] = "tracing runs every op on tensors without data"
    hint: ClassVar[str] = "give it one with torch.library.register_fake"
    expected: ClassVar[str] = "ops with a fake (meta) implementation"


@dataclass(frozen=True)
class JointUntraceable(TraceRule):
    """Forward and backward can be traced together."""

    id: ClassVar[str] = "joint-untraceable"
    title: ClassVar[str] = "the callable's forward and backward do not fit into one joint graph"
    why: ClassVar[str] = "a replay's backward is captured from the joint graph"
    hint: ClassVar[str] = "run forward and backward eagerly on these arguments: the same error comes up there"
    expected: ClassVar[str] = "a callable whose backward works in eager"


TRACE_RULES: tuple[TraceRule, ...] = (Untraceable(), OpFailed(), NoFakeImpl(), JointUntraceable())
"""The rules that tracing judges."""
