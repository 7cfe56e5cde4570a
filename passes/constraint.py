"""How a rule is named, judged and reported.

A constraint is an object, not an ``if``: it has a permanent id, a title, one sentence why, and a hint. Judging it gives
a verdict that is either truthy (`Satisfied`) or falsy *and carries the reason* (`Violation`), so that a caller can both
branch on it and print it. `judge` runs constraints over one subject and reports all violations at once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node

from .op_lists import WRAPPERS

S_contra = TypeVar("S_contra", contravariant=True)

_KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_TEXTS = ("id", "title", "why", "hint")


@dataclass(frozen=True)
class Where:
    """The place of a verdict; every part is optional.

    Attributes:
        file: source file of the user's code.
        line: line in ``file``, counted from 1.
        node: name of the FX node.
        path: the value in the user's terms, e.g. ``buffer 'bn.running_mean'`` or ``args[1]['mask']``.
    """

    file: str | None = None
    line: int | None = None
    node: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.path:
            parts.append(self.path)
        if self.node:
            parts.append(f"node {self.node}")
        if self.file:
            parts.append(self.file if self.line is None else f"{self.file}:{self.line}")
        return ", ".join(parts) if parts else "unknown place"


@dataclass(frozen=True)
class Satisfied:
    """The truthy verdict: ``constraint`` holds."""

    constraint: Constraint[Any]

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Violation:
    """The falsy verdict: ``constraint`` does not hold at ``where``.

    Attributes:
        constraint: the rule that is violated.
        where: the place.
        observed: what is there.
        expected: what would satisfy the rule.
        hint: what to do about it.
    """

    constraint: Constraint[Any]
    where: Where
    observed: str
    expected: str
    hint: str

    @property
    def id(self) -> str:
        """The permanent id of the violated rule."""
        return self.constraint.id

    @property
    def title(self) -> str:
        """The title of the violated rule."""
        return self.constraint.title

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        rows = {"where": str(self.where), "observed": self.observed, "expected": self.expected, "hint": self.hint}
        lines = [f"[{self.id}] {self.title}"]
        for label, text in rows.items():
            lines.append(f"  {label + ':':<9} " + text.replace("\n", "\n" + " " * 12))
        return "\n".join(lines)


Verdict: TypeAlias = "Satisfied | Violation"


@dataclass(frozen=True)
class Constraint(Generic[S_contra]):
    """One named rule about a subject. Subclasses are frozen dataclasses whose fields are the rule's options.

    Class attributes:
        id: permanent kebab-case name; never reused for another meaning.
        title: what is wrong when it is violated, without context.
        why: one sentence why the rule exists.
        hint: what a user can do, the default of `Violation.hint`.

    Raises:
        TypeError: on definition of a subclass whose ``id`` is not kebab-case or that has an ``id`` but lacks a text.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    why: ClassVar[str]
    hint: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "id"):
            return  # an intermediate base, such as NodeConstraint
        if not _KEBAB.match(cls.id):
            raise TypeError(f"{cls.__name__}.id must be kebab-case, got {cls.id!r}")
        for text in _TEXTS:
            if not getattr(cls, text, None):
                raise TypeError(f"{cls.__name__} has the id {cls.id!r} but no {text}")

    def violations(self, subject: S_contra) -> Iterator[Violation]:
        """Yield every violation in ``subject``, in the subject's own order."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is judged")

    def verdict(self, subject: S_contra) -> Verdict:
        """Return the first violation in ``subject``, or `Satisfied`."""
        return next(self.violations(subject), Satisfied(self))

    def violation(self, where: Where, observed: str, expected: str, hint: str | None = None) -> Violation:
        """Return a `Violation` of this rule; ``hint`` defaults to the rule's own."""
        return Violation(self, where, observed, expected, self.hint if hint is None else hint)


@dataclass(frozen=True)
class NodeConstraint(Constraint[GraphModule]):
    """A rule that is judged node by node, so that a caller also learns *which* nodes violate it (`node_verdict`)."""

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a node is judged")

    def is_consequence(self, node: Node) -> bool:
        """Return whether a violation at ``node`` only follows from one that is reported elsewhere.

        Such a violation is left out of `violations`, so that a report names causes; `node_verdict` still gives it.
        """
        return False

    def violations(self, subject: GraphModule) -> Iterator[Violation]:
        """Yield the violation of each node, in the graph's order, nested GraphModules that are called included.

        What is in a graph that a higher-order op runs is in the line of its own, and at the node of the op.

        Raises:
            TypeError: if `node_verdict` gives something else than a verdict, for then the rule says nothing.
        """
        for node in as_graph_module(subject).graph.nodes:
            verdict: object = self.node_verdict(node)
            if not isinstance(verdict, (Satisfied, Violation)):
                raise _no_verdict(self, f"node_verdict({node.name})", verdict, "Satisfied(self) or self.violation(...)")
            if isinstance(verdict, Violation) and not self.is_consequence(node):
                yield verdict
            yield from self.violations_inside(subject, node)

    def violations_inside(self, subject: GraphModule, node: Node) -> Iterator[Violation]:
        """Yield the violations in the graphs that a node calls: as a module, or through a higher-order op."""
        if node.op == "call_module":
            child = subject.get_submodule(str(node.target))
            if isinstance(child, GraphModule):
                yield from self.violations(child)
        for part in graphs_given_to(node, WRAPPERS, subject):
            for found in self.violations(part):
                yield replace(found, where=replace(found.where, node=node.name))


@dataclass(frozen=True)
class Report:
    """All violations found in one subject. Truthy if and only if there is none."""

    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no violation."""
        return not self.violations

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the violated rules, each once, in order of appearance."""
        return tuple(dict.fromkeys(violation.id for violation in self.violations))

    def __bool__(self) -> bool:
        return self.ok

    def __add__(self, other: Report) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        return Report(self.violations + other.violations)

    def __str__(self) -> str:
        if self.ok:
            return "no violations"
        count = len(self.violations)
        head = "1 violation" if count == 1 else f"{count} violations"
        return "\n\n".join([head, *(str(violation) for violation in self.violations)])


def graphs_given_to(node: Node, ops: Collection[str], owner: torch.nn.Module | None) -> list[GraphModule]:
    """Return the graphs, attributes of ``owner``, that a node is given if it is one of these higher-order ops."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in ops:
        return []
    given = [operator.attrgetter(str(one.target))(owner) for one in node.all_input_nodes if one.op == "get_attr"]
    return [one for one in given if isinstance(one, GraphModule)]


def judge(subject: S_contra, constraints: Iterable[Constraint[S_contra]]) -> Report:
    """Judge ``subject`` by every constraint and return all violations, grouped by constraint in the given order.

    Raises:
        TypeError: if a constraint gives something else than violations.
    """
    found: list[Violation] = []
    for constraint in constraints:
        given: object = constraint.violations(subject)
        if not isinstance(given, Iterable):
            raise _no_verdict(constraint, "violations()", given, "an iterator of violations: yield each of them")
        for violation in given:
            if not isinstance(violation, Violation):
                raise _no_verdict(constraint, "violations()", violation, "what self.violation(...) makes")
            found.append(violation)
    return Report(tuple(found))


def as_graph_module(subject: object) -> GraphModule:
    """Return ``subject`` if it is a GraphModule.

    Raises:
        TypeError: if it is not; it says how to get one.
    """
    if isinstance(subject, GraphModule):
        return subject
    kind = f"{type(subject).__module__.removeprefix('builtins')}.{type(subject).__qualname__}".lstrip(".")
    if isinstance(subject, Graph):
        how = "wrap it, torch.fx.GraphModule(module, graph), with the module whose attributes it names"
    elif isinstance(subject, torch.export.ExportedProgram):
        how = "take exported.module()"
    else:
        how = (
            "trace it first: torch.fx.symbolic_trace(module), torch.export.export(module, args).module() or "
            "make_fx(function)(*args); fxgraph.check(callable, args) traces by itself"
        )
    raise TypeError(f"expected a torch.fx.GraphModule, got an object of type {kind}: {how}")


def _no_verdict(rule: Constraint[Any], method: str, given: object, expected: str) -> TypeError:
    return TypeError(f"rule {rule.id!r} ({type(rule).__qualname__}): {method} gave {given!r}, expected {expected}")
