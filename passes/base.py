"""What a pass is: a frozen dataclass whose fields are its options and whose docstring is its contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from .constraint import Constraint, Report, as_graph_module, judge
from .verify import Lint

MALFORMED = "the graph is malformed after this pass"


class PassError(RuntimeError):
    """A pass was given, or made, a graph that breaks a rule, or it raised.

    Attributes:
        pass_name: the guilty pass; ``input`` if the graph was malformed before the first one.
        problem: what is wrong, in one phrase.
        stage: ``requires``, ``ensures``, ``verify`` or ``run``.
        report: the violations; empty for ``run``, where ``__cause__`` is what the pass raised.
        diff: what the pass had changed, as a unified diff; empty if it changed nothing or did not get that far.
        hint: what to do, where the violations do not say it.
    """

    def __init__(
        self, pass_name: str, stage: str, problem: str, report: Report | None = None, diff: str = "", hint: str = ""
    ) -> None:
        """Compose the message: who, what, what to do, the violations, the diff."""
        self.pass_name = pass_name
        self.stage = stage
        self.problem = problem
        self.report = Report() if report is None else report
        self.diff = diff
        self.hint = hint
        head = f"{pass_name}: {problem}" + (f"\n  hint:     {hint}" if hint else "")
        parts = [head, "" if self.report.ok else str(self.report), diff]
        super().__init__("\n\n".join(part for part in parts if part))


@dataclass(frozen=True)
class Pass:
    """A rewrite of a GraphModule. Subclasses are frozen dataclasses and define `rewrite`.

    Class attributes:
        requires: what the given graph must satisfy.
        ensures: what the returned graph satisfies; judged on what was *returned*.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = ()
    ensures: ClassVar[tuple[Constraint[GraphModule], ...]] = ()

    @property
    def name(self) -> str:
        """The name in messages: class and options."""
        return repr(self)

    def rewrite(self, gm: GraphModule) -> bool:
        """Change ``gm`` in place and return whether anything changed, True or False. The caller recompiles."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it rewrites")

    def __call__(self, gm: GraphModule) -> PassResult:
        """Rewrite ``gm`` in place and return it with a flag that says whether it changed.

        Raises:
            PassError: if ``gm`` breaks a rule of `requires`, or what is returned one of `ensures`; if `rewrite` returns
                something else than a bool, or leaves a graph that torch refuses.
            TypeError: if ``gm`` is no GraphModule.
        """
        before = judge(as_graph_module(gm), self.requires)
        if not before:
            raise PassError(self.name, "requires", "the graph is not what this pass works on", before)
        modified: object = self.rewrite(gm)
        if not isinstance(modified, bool):
            problem, hint = (
                f"rewrite() returned {modified!r}, expected True or False",
                "return whether it changed anything",
            )
            raise PassError(self.name, "run", problem, hint=hint)
        if modified:
            malformed = judge(gm, (Lint(),))
            if not malformed:
                raise PassError(self.name, "verify", MALFORMED, malformed)
            gm.recompile()
        after = judge(gm, self.ensures)
        if not after:
            raise PassError(self.name, "ensures", "the result breaks what this pass promises", after)
        return PassResult(gm, modified)
