"""What can come of a comparison with eager, and the row that says so."""

from __future__ import annotations

import enum
from typing import Any

import fxgraph

Row = dict[str, Any]
"""One line of a results file: ``case`` (its key), ``outcome``, and what the kind of case adds."""


class Outcome(str, enum.Enum):
    """Best first; a case with several samples has the worst outcome of its samples."""

    NOT_INSTALLED = "not installed"
    """The library that the case is made of is not there."""
    SKIPPED = "skipped"
    """Eager itself raises on every sample."""
    EQUAL = "equal"
    """Every call was answered by a replay and equals eager."""
    EAGER = "eager"
    """Equals eager; at least one call ran eagerly, with a stated reason."""
    REFUSED = "refused"
    """An :class:`fxgraph.FxgraphError`, with its id; or an error of ``torch.compile`` that every backend gets."""
    UNSTATED = "unstated"
    """Equals eager, but neither a replay nor a reason was counted."""
    TIMEOUT = "timeout"
    """The case did not end in time and its process was killed."""
    CRASH = "crash"
    """An exception that is none of fxgraph's, or the death of the process, where eager works."""
    WRONG = "wrong"
    """A call that did not equal eager, without an error."""

    @property
    def severity(self) -> int:
        """Place in the order of the members; the higher the worse."""
        return list(Outcome).index(self)

    @property
    def is_failure(self) -> bool:
        """Whether the library's promise is broken: equal to eager, or a stated reason."""
        return self in (Outcome.UNSTATED, Outcome.TIMEOUT, Outcome.CRASH, Outcome.WRONG)


def worst(outcomes: list[Outcome]) -> Outcome:
    """The worst of some outcomes; ``SKIPPED`` of none."""
    return max(outcomes, key=lambda outcome: outcome.severity, default=Outcome.SKIPPED)


def refusal(error: BaseException) -> fxgraph.FxgraphError | None:
    """The refusal that an exception is, or that another library (Dynamo) has wrapped; None where there is none."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, fxgraph.FxgraphError):
            return current
        seen.add(id(current))
        inner = getattr(current, "inner_exception", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__
    return None


def describe(error: BaseException) -> str:
    """An exception, or the one inside of Dynamo's, in one line of at most 300 characters."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return describe(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
