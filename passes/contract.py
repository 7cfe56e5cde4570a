"""What a callable and its arguments must satisfy before they can be captured.

`CONTRACT` is the list: one rule per clause that forbids something. Every rule takes a `CallSite` and needs neither a
graph nor a GPU. `UNUSED_INPUT` is judged later, when it is known which inputs have a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .call_site import CallSite
from .constraint import Constraint, Report, Violation, Where, judge
from .contract_arguments import SeveralDevices, TensorSubclass, UnsupportedArgument, UnsupportedLayout, WrongArguments
from .contract_callable import BufferRequiresGrad, MetaTensor, ModuleHooks, NotCallable, ScriptedCallable

CONTRACT: tuple[Constraint[CallSite], ...] = (
    NotCallable(),
    ScriptedCallable(),
    ModuleHooks(),
    BufferRequiresGrad(),
    WrongArguments(),
    UnsupportedArgument(),
    TensorSubclass(),
    UnsupportedLayout(),
    MetaTensor(),
    SeveralDevices(),
)
"""The rules on a callable and its sample arguments, in the order in which they are reported."""


@dataclass(frozen=True)
class DifferentiableInputs:
    """Which inputs ask for a gradient and which of them have none.

    Attributes:
        names: every input with ``requires_grad=True``, in the user's terms (``args[0]``, ``parameter 'w'``).
        unused: those of ``names`` whose gradient is None, in any order.
        where: the forward's definition.

    Raises:
        ValueError: if ``unused`` holds a name that ``names`` lacks.
    """

    names: tuple[str, ...]
    unused: tuple[str, ...]
    where: Where = field(default_factory=Where)

    def __post_init__(self) -> None:
        unknown = [name for name in self.unused if name not in self.names]
        if unknown:
            raise ValueError(f"unused inputs that are not among the differentiable ones: {unknown}")


@dataclass(frozen=True)
class UnusedInput(Constraint[DifferentiableInputs]):
    """An input that requires grad must influence some output that does; one violation per unused input."""

    id: ClassVar[str] = "unused-input"
    title: ClassVar[str] = "an input requires grad but no output depends on it"
    why: ClassVar[str] = "an input without a gradient is most often a mistake: it would silently never be trained"
    hint: ClassVar[str] = "use the input, set requires_grad=False on it, or pass allow_unused_input=True"

    def violations(self, subject: DifferentiableInputs) -> Iterator[Violation]:
        """Yield one violation per unused input, in the order of ``subject.names``."""
        for name in subject.names:
            if name in subject.unused:
                place = Where(file=subject.where.file, line=subject.where.line, node=subject.where.node, path=name)
                yield self.violation(place, "its gradient is None", "a gradient for each input that requires grad")


UNUSED_INPUT: tuple[Constraint[DifferentiableInputs], ...] = (UnusedInput(),)
"""The rules on the inputs of a joint forward/backward graph; skipped when the caller allows unused inputs."""


def check_call(
    callable: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, name: str = ""
) -> Report:
    """Judge ``callable(*args, **kwargs)`` by `CONTRACT` without calling it.

    Raises:
        TypeError: if ``args`` is not a tuple or ``kwargs`` is not a dict with string keys.
    """
    return judge(CallSite(callable, args, {} if kwargs is None else kwargs, name), CONTRACT)
