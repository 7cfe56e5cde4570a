"""What a well-formed graph satisfies, whatever it computes.

`WELL_FORMED` holds for the graphs of all tracers; the pipeline judges it before the first and after each pass.
`AtenLevel` and `HasFakeValues` are what rewrites of ATen graphs ask for in addition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._ops import OperatorBase, OpOverload
from torch.fx import GraphModule, Node

from .constraint import Constraint, NodeConstraint, Report, Satisfied, Verdict, Violation, Where, as_graph_module, judge
from .facts import describe_call, value_of, where_of
from .verify_calls import FitsSchema


@dataclass(frozen=True)
class Lint(Constraint[GraphModule]):
    """torch's own ``graph.lint()`` accepts the graph: unique names, values defined before use, targets that exist."""

    id: ClassVar[str] = "lint"
    title: ClassVar[str] = "the graph is malformed"
    why: ClassVar[str] = "torch.fx cannot run or print such a graph"
    hint: ClassVar[str] = "insert nodes before their users, and erase a node only once it has none"

    def violations(self, subject: GraphModule) -> Iterator[Violation]:
        """Yield one violation with the first complaint of ``graph.lint()``."""
        try:
            subject.graph.lint()
        except (RuntimeError, AttributeError, ValueError) as error:  # what lint raises for names, order and targets
            yield self.violation(Where(), str(error), "graph.lint() accepts it")


@dataclass(frozen=True)
class PlaceholdersFirst(NodeConstraint):
    """No placeholder follows a node of another kind: the order of placeholders is the signature."""

    id: ClassVar[str] = "placeholders-first"
    title: ClassVar[str] = "a placeholder follows another kind of node"
    why: ClassVar[str] = "passes read the signature off the leading nodes"
    hint: ClassVar[str] = "insert placeholders before the first node that is none"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        before = node.prev
        if node.op != "placeholder" or before.op in ("root", "placeholder", "get_attr"):
            return Satisfied(self)
        return self.violation(where_of(node), f"placeholder after {before.op} {before.name}", "placeholders come first")


@dataclass(frozen=True)
class OneOutput(Constraint[GraphModule]):
    """The graph ends with its one output node."""

    id: ClassVar[str] = "one-output"
    title: ClassVar[str] = "the graph does not end with one output"
    why: ClassVar[str] = "nodes after the output never run, and without one nothing is returned"
    hint: ClassVar[str] = "keep one output node, last"

    def violations(self, subject: GraphModule) -> Iterator[Violation]:
        """Yield one violation if there is no output node, several, or one that is not last."""
        nodes = list(subject.graph.nodes)
        outputs = [node for node in nodes if node.op == "output"]
        if len(outputs) != 1:
            yield self.violation(Where(), f"{len(outputs)} output nodes", "one output node")
        elif outputs[0] is not nodes[-1]:
            yield self.violation(
                where_of(outputs[0]), f"{nodes[-1].name} follows the output", "the output node is last"
            )


@dataclass(frozen=True)
class MissingFakeValue(NodeConstraint):
    """A call whose inputs all carry a fake value carries one itself, so no pass loses what the tracer knew."""

    id: ClassVar[str] = "missing-fake-value"
    title: ClassVar[str] = "a node has no fake value although its inputs have one"
    why: ClassVar[str] = "rules and passes read shapes, strides and devices off node.meta['val']"
    hint: ClassVar[str] = "set meta['val'] on each node that a pass creates"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node; ops that return nothing are exempt, and writes whose result no op reads:
        torch.export leaves these without one, and Dynamo assignments to items and asserts.
        """
        if node.op != "call_function" or _has_value(node) or not _returns_something(node):
            return Satisfied(self)
        writes = node.target._schema.is_mutable if isinstance(node.target, OpOverload) else not node.users
        if writes and all(user.op == "output" for user in node.users):
            return Satisfied(self)
        known = [source.name for source in node.all_input_nodes if _has_value(source)]
        if not known or len(known) < len(node.all_input_nodes):
            return Satisfied(self)
        observed = f"{describe_call(node)} without meta['val']; {', '.join(known)} with it"
        return self.violation(where_of(node), observed, "meta['val'] on every call")


@dataclass(frozen=True)
class ReadAfterWriteBack(NodeConstraint):
    """Once an input has been written back (``aten.copy_`` into a placeholder, its result unused, or
    ``aten._foreach_copy_`` into several), nothing reads it.

    Tracers put write-backs last, and later code uses the copy's result. A read that a pass moved or left behind a
    write-back sees the new value where the program means the old one.
    """

    id: ClassVar[str] = "read-after-write-back"
    title: ClassVar[str] = "an input is read after it was written back"
    why: ClassVar[str] = "the read sees the new value where the traced program meant the old one"
    hint: ClassVar[str] = "keep write-backs behind every other reader, or read the result of the copy"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one write-back."""
        for target in _written_back(node):
            late = next((user for user in target.users if user.op != "output" and user > node), None)
            if late is not None:
                observed = f"{late.name} reads {target.name} after {node.name} wrote it"
                expected = f"{node.name} after every reader of {target.name}"
                return self.violation(where_of(late), observed, expected)
        return Satisfied(self)


@dataclass(frozen=True)
class Recompiled(Constraint[GraphModule]):
    """The module's code is that of its graph: ``recompile()`` was called after the last change."""

    id: ClassVar[str] = "recompiled"
    title: ClassVar[str] = "the code is not that of the graph"
    why: ClassVar[str] = "the module runs its code, so changes to the graph have no effect before recompile()"
    hint: ClassVar[str] = "call graph_module.recompile() after changing the graph"

    def violations(self, subject: GraphModule) -> Iterator[Violation]:
        """Yield one violation if the code is stale, or if the graph has none."""
        try:
            held, fresh = subject.code.splitlines(), subject.graph.python_code("self").src.splitlines()
        except (AssertionError, NotImplementedError) as error:  # what torch raises for no callee, no kind of node
            yield self.violation(Where(), f"there is no code for the graph: {error}", "nodes that have code")
            return
        if held != fresh:
            line = next((line for line in fresh if line not in held), "fewer lines")
            yield self.violation(
                Where(), f"the graph has {line.strip()!r}, the code does not", "the same lines in both"
            )


WELL_FORMED: tuple[Constraint[GraphModule], ...] = (
    Lint(),
    FitsSchema(),
    PlaceholdersFirst(),
    OneOutput(),
    MissingFakeValue(),
    ReadAfterWriteBack(),
    Recompiled(),
)
"""The rules on every graph, in the order in which they are reported."""


@dataclass(frozen=True)
class AtenLevel(NodeConstraint):
    """Every call is an operator (``torch.ops...``) or Python arithmetic on sizes; none is a method or a module."""

    id: ClassVar[str] = "aten-level"
    title: ClassVar[str] = "a call is not an operator"
    why: ClassVar[str] = "what a Python function aliases or writes cannot be read off a schema"
    hint: ClassVar[str] = "apply LowerToAten() first, or trace with make_fx or AOTAutograd"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node."""
        if node.op in ("call_method", "call_module"):
            return self.violation(where_of(node), f"{node.op} {describe_call(node)}", "a call of torch.ops")
        if node.op == "call_function" and not isinstance(node.target, OperatorBase) and not _is_arithmetic(node):
            return self.violation(where_of(node), f"{node.op} {describe_call(node)}", "a call of torch.ops")
        return Satisfied(self)


@dataclass(frozen=True)
class HasFakeValues(NodeConstraint):
    """Every placeholder and every call carries a fake value."""

    id: ClassVar[str] = "has-fake-values"
    title: ClassVar[str] = "a node has no fake value"
    why: ClassVar[str] = "the pass reads strides and storages off node.meta['val']"
    hint: ClassVar[str] = "apply LowerToAten(example_inputs) first, or trace with make_fx or AOTAutograd"

    def node_verdict(self, node: Node) -> Verdict:
        """Return the verdict on one node; ops that return nothing are exempt."""
        if node.op not in ("placeholder", "call_function") or _has_value(node) or not _returns_something(node):
            return Satisfied(self)
        return self.violation(where_of(node), f"{node.op} {node.name} without meta['val']", "meta['val'] on it")


def verify(gm: GraphModule) -> Report:
    """Judge ``gm`` by `WELL_FORMED`.

    Raises:
        TypeError: if ``gm`` is no GraphModule.
    """
    return judge(as_graph_module(gm), WELL_FORMED)


def _has_value(node: Node) -> bool:
    return value_of(node) is not None or any(key in node.meta for key in ("val", "example_value"))


def _written_back(node: Node) -> list[Node]:
    """The placeholders into which a write-back copies; none if ``node`` is no write-back."""
    if not node.args or node.users:
        return []
    targets: Any = {torch.ops.aten.copy_.default: [node.args[0]], torch.ops.aten._foreach_copy_.default: node.args[0]}
    found = targets.get(node.target, [])
    return [target for target in found if isinstance(target, Node) and target.op == "placeholder"]


def _returns_something(node: Node) -> bool:
    return not isinstance(node.target, OpOverload) or bool(node.target._schema.returns)


def _is_arithmetic(node: Node) -> bool:
    """Whether a Python call takes an element of a tuple or computes a number, as tracers leave them in ATen graphs."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return node.target is operator.getitem or isinstance(value_of(node), numbers)
