"""Every way fxgraph says no. A leaf: all rooms may import it.

One class per moment at which something can be refused, all of them :class:`FxgraphError`, each also the built-in class
that a PyTorch user would expect to catch. The text has one format in both packages:

    [id] title
      where:    file:line, or the argument
      observed: ...
      expected: ...
      hint:     what to do
      fxgraph:  what was done instead, where something was
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from passes import Report, Violation


Kind = TypeVar("Kind", bound="FxgraphError")


class FxgraphError(Exception):
    """Base of every refusal.

    Attributes:
        id: permanent kebab-case id of the (first) rule that was broken.
        where, observed, expected, hint: the parts of the message of the first violation.
        violations: all violations, in the order in which they were found (empty where no rule of ``passes`` speaks).
    """

    _plain: ClassVar[type[FxgraphError] | None] = None  # where this class is made by _both

    def __init__(
        self,
        id: str,
        title: str,
        *,
        where: str = "",
        observed: str = "",
        expected: str = "",
        hint: str = "",
        instead: str = "",
        violations: tuple[Violation, ...] = (),
    ) -> None:
        self.id = id
        self.title = title
        self.where = where
        self.observed = observed
        self.expected = expected
        self.hint = hint
        self.violations = violations
        lines = [f"[{id}] {title}"]
        parts = (("where", where), ("observed", observed), ("expected", expected), ("hint", hint), ("fxgraph", instead))
        lines += [f"  {name + ':':<9} {text}" for name, text in parts if text]
        super().__init__("\n".join(lines))

    @classmethod
    def from_report(cls, report: Report) -> FxgraphError:
        """The error that says everything the (not ok) report says; its attributes are those of the first violation."""
        first = report.violations[0]
        attributes = {name: getattr(first, name) for name in ("id", "title", "observed", "expected", "hint")}
        return _rebuild(cls, str(report), {**attributes, "where": str(first.where), "violations": report.violations})

    def of_kind(self: Kind, own: BaseException) -> Kind:
        """This error, which ``except`` clauses for the kind of the callable's own error catch too from now on."""
        mine: Any = type(self)
        its: Any = type(own)
        self.__class__ = _both(mine, its)
        return self

    def __str__(self) -> str:
        return str(self.args[0])  # not as KeyError shows it

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._plain or type(self), str(self), self.__dict__)


@functools.cache
def _both(kind: type[Any], own: type[BaseException]) -> type[Any]:
    """A class that is of both kinds; ``kind`` where it is, or where Python cannot combine them."""
    if issubclass(kind, own) or not issubclass(own, Exception):
        return kind
    try:
        return type(
            kind.__name__, (kind, own), {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind}
        )
    except TypeError:  # of another layout in memory, such as OSError
        return kind


def _rebuild(cls: type[FxgraphError], text: str, attributes: dict[str, Any]) -> FxgraphError:
    error = cls.__new__(cls)
    Exception.__init__(error, text)
    error.__dict__.update(attributes)
    return error


class OptionError(FxgraphError, ValueError):
    """An option or argument of fxgraph's own that does not exist or has a value that is not allowed."""


class ContractError(FxgraphError, ValueError):
    """The callable or its sample arguments break a clause of the contract (hooks, buffers that require grad, ...)."""


class InputError(FxgraphError, TypeError):
    """A call's arguments do not fit the callable."""


class TraceError(FxgraphError, RuntimeError):
    """The callable could not be read into a graph, or an op in it failed on these inputs."""


class UncapturableError(FxgraphError, RuntimeError):
    """The graph holds something that no CUDA graph can hold, and ``on_uncapturable="error"``."""


class SignatureError(FxgraphError, RuntimeError):
    """A call matches no capture, and ``on_new_signature="error"``."""


class CaptureError(FxgraphError, RuntimeError):
    """The engine failed while warming up or capturing. The cause is attached; nothing is left capturing."""


class ReplayError(FxgraphError, RuntimeError):
    """A call or a backward that no replay can serve and eager cannot take over either."""


class DoubleBackwardError(FxgraphError, RuntimeError):
    """``create_graph=True`` through a callable whose forward cannot be run again."""


class VerifyError(FxgraphError, RuntimeError):
    """``verify=n`` found a replay that differs from eager: a fault of fxgraph."""


def add_note(error: BaseException, note: str) -> None:
    """PEP 678's ``add_note``, on Python 3.10 too (where tracebacks do not print it, but tools that read it do)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes = [*getattr(error, "__notes__", []), note]
        error.__notes__ = notes  # type: ignore[attr-defined]
