"""How a rule is named, judged and reported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.fx import GraphModule, Node, symbolic_trace

import passes
from passes import Constraint, NodeConstraint, Report, Satisfied, Verdict, Violation, Where, judge
from passes.facts import where_of


@dataclass(frozen=True)
class Even(Constraint[list[int]]):
    id: ClassVar[str] = "even-number"
    title: ClassVar[str] = "a number is odd"
    why: ClassVar[str] = "the test says so"
    hint: ClassVar[str] = "add one"

    def violations(self, subject: list[int]) -> Iterator[Violation]:
        for index, number in enumerate(subject):
            if number % 2:
                yield self.violation(Where(path=f"[{index}]"), str(number), "an even number")


@dataclass(frozen=True)
class Small(Constraint[list[int]]):
    id: ClassVar[str] = "small-number"
    title: ClassVar[str] = "a number is large"
    why: ClassVar[str] = "the test says so"
    hint: ClassVar[str] = "take another"
    limit: int = 10

    def violations(self, subject: list[int]) -> Iterator[Violation]:
        for index, number in enumerate(subject):
            if number > self.limit:
                yield self.violation(Where(path=f"[{index}]"), str(number), f"at most {self.limit}", "divide")


@dataclass(frozen=True)
class NoNeg(NodeConstraint):
    id: ClassVar[str] = "no-neg"
    title: ClassVar[str] = "a node negates"
    why: ClassVar[str] = "the test says so"
    hint: ClassVar[str] = "subtract"

    def node_verdict(self, node: Node) -> Verdict:
        if node.target is torch.neg:
            return self.violation(where_of(node), "torch.neg", "anything else")
        return Satisfied(self)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (Where(), "unknown place"),
        (Where(path="args[1]['mask']"), "args[1]['mask']"),
        (Where(file="m.py", line=3, node="add", path="buffer 'b'"), "buffer 'b', node add, m.py:3"),
        (Where(file="m.py", node="add"), "node add, m.py"),
    ],
)
def test_where_lists_the_known_parts_from_the_value_to_the_file(where: Where, text: str) -> None:
    assert str(where) == text


def test_a_violation_is_falsy_and_carries_everything_a_message_needs() -> None:
    verdict = Even().verdict([2, 3])
    assert not verdict
    assert isinstance(verdict, Violation)
    assert (verdict.id, verdict.title, verdict.constraint) == ("even-number", "a number is odd", Even())
    assert (verdict.where, verdict.observed, verdict.expected, verdict.hint) == (
        Where(path="[1]"),
        "3",
        "an even number",
        "add one",
    )


def test_the_format_of_a_violation_is_fixed() -> None:
    violation = Violation(Even(), Where(path="[0]"), "line one\nline two", "an even number", "add one")
    assert str(violation) == textwrap.dedent(
        """\
        [even-number] a number is odd
          where:    [0]
          observed: line one
                    line two
          expected: an even number
          hint:     add one"""
    )


def test_a_satisfied_verdict_is_truthy_and_names_its_rule() -> None:
    verdict = Even().verdict([2, 4])
    assert verdict
    assert verdict == Satisfied(Even())


def test_verdicts_and_reports_cannot_be_changed() -> None:
    violation = next(Even().violations([1]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        violation.observed = "nothing"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Report().violations = (violation,)  # type: ignore[misc]


def test_a_report_gives_all_violations_of_all_rules_at_once_with_the_count_first() -> None:
    report = judge([1, 12, 13], [Even(), Small()])
    assert not report
    assert not report.ok
    assert [(violation.id, violation.where.path) for violation in report.violations] == [
        ("even-number", "[0]"),
        ("even-number", "[2]"),
        ("small-number", "[1]"),
        ("small-number", "[2]"),
    ]
    assert report.ids == ("even-number", "small-number")
    first, *rest = str(report).split("\n\n")
    assert first == "4 violations"
    assert rest == [str(violation) for violation in report.violations]
    assert rest[3].endswith("hint:     divide")


def test_a_report_without_violations_is_truthy_and_says_so() -> None:
    report = judge([2], [Even(), Small()])
    assert report
    assert report.ok
    assert str(report) == "no violations"
    assert report.ids == ()


def test_one_violation_is_in_the_singular() -> None:
    assert str(judge([1], [Even()])).splitlines()[0] == "1 violation"


def test_options_of_a_rule_are_its_fields() -> None:
    assert judge([12], [Small(limit=12)])
    assert judge([12], [Small(limit=11)]).violations[0].expected == "at most 11"


def test_reports_add_up_in_order() -> None:
    one, two = judge([1], [Even()]), judge([12], [Small()])
    assert (one + two).ids == ("even-number", "small-number")
    assert (one + two).violations == one.violations + two.violations
    with pytest.raises(TypeError):
        one + 1  # type: ignore[operator]


@pytest.mark.parametrize("bad", ["Even", "even_number", "even--number", "-even", "2nd", "even-number\n", ""])
def test_an_id_that_is_not_kebab_case_is_refused_at_definition(bad: str) -> None:
    with pytest.raises(TypeError, match="kebab-case"):
        type("Bad", (Constraint,), {"id": bad, "title": "t", "why": "w", "hint": "h"})


@pytest.mark.parametrize("missing", ["title", "why", "hint"])
def test_a_rule_without_one_of_its_texts_is_refused_at_definition(missing: str) -> None:
    texts = {"id": "some-rule", "title": "t", "why": "w", "hint": "h"}
    del texts[missing]
    with pytest.raises(TypeError, match=f"no {missing}"):
        type("Bad", (Constraint,), texts)


def test_a_rule_that_does_not_say_how_it_is_judged_raises_instead_of_passing() -> None:
    silent = type("Silent", (Constraint,), {"id": "silent", "title": "t", "why": "w", "hint": "h"})
    with pytest.raises(NotImplementedError, match="Silent"):
        judge(1, [silent()])


@pytest.mark.parametrize("given", [None, True, False, "no"])
def test_a_node_verdict_that_is_none_is_not_taken_for_a_good_one(given: object) -> None:
    @dataclass(frozen=True)
    class Vague(NoNeg):
        def node_verdict(self, node: Node) -> Verdict:
            return given  # type: ignore[return-value]

    gm = symbolic_trace(lambda x: torch.neg(x))
    message = rf"rule 'no-neg' \(.*Vague\): node_verdict\(x\) gave {given!r}, expected Satisfied\(self\) or self.viol"
    with pytest.raises(TypeError, match=message):
        passes.check(gm, [Vague()])


@pytest.mark.parametrize("given", [None, True, ["odd"], [None]])
def test_what_a_rule_yields_must_be_violations(given: object) -> None:
    @dataclass(frozen=True)
    class Vague(Even):
        def violations(self, subject: list[int]) -> Iterator[Violation]:
            return given  # type: ignore[return-value]

    shown = given[0] if isinstance(given, list) else given
    with pytest.raises(TypeError, match=rf"rule 'even-number' \(.*Vague\): violations\(\) gave {shown!r}, expected"):
        judge([1], [Small(), Vague()])


def test_a_node_constraint_gives_a_verdict_per_node_and_enters_called_graph_modules() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.neg(x)

    inner = symbolic_trace(Inner())

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.neg(x))

    class KeepInner(torch.fx.Tracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return m is inner

    root = Outer()
    gm = GraphModule(root, KeepInner().trace(root))
    assert [bool(NoNeg().node_verdict(node)) for node in gm.graph.nodes] == [True, False, True, True]
    assert [violation.where.node for violation in NoNeg().violations(gm)] == ["neg", "neg"]


RULES = [*passes.CONTRACT, *passes.UNUSED_INPUT, *passes.CAPTURABLE, *passes.WELL_FORMED]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_rule_has_texts_for_a_person_and_a_docstring(rule: Constraint[object]) -> None:
    for text in (rule.title, rule.why, rule.hint):
        assert text == text.strip() and "\n" not in text and not text.endswith(".")
    assert type(rule).__doc__


@pytest.mark.parametrize(
    "rules", [passes.CONTRACT, passes.CAPTURABLE, passes.WELL_FORMED], ids=["call", "graph", "form"]
)
def test_ids_within_one_list_are_unique(rules: tuple[Constraint[object], ...]) -> None:
    ids = [rule.id for rule in rules]
    assert len(set(ids)) == len(ids)


def test_a_rule_on_calls_and_one_on_graphs_that_share_an_id_share_its_title() -> None:
    titles: dict[str, set[str]] = {}
    for rule in RULES:
        titles.setdefault(rule.id, set()).add(rule.title)
    assert all(len(known) == 1 for known in titles.values())


def test_the_package_works_alone_and_never_initialises_cuda(tmp_path: Path) -> None:
    """A folder that holds passes and nothing else, a process that imports it, checks, and rewrites."""
    (tmp_path / "passes").symlink_to(Path(passes.__file__).parent, target_is_directory=True)
    script = textwrap.dedent(
        f"""
        import sys
        hidden = ("", {str(Path(passes.__file__).parent.parent)!r})
        sys.path[:] = [{str(tmp_path)!r}] + [p for p in sys.path if p not in hidden]
        import torch
        def refuse(*args, **kwargs):
            raise AssertionError("CUDA was initialised")
        torch.cuda._lazy_init = refuse
        torch._C._cuda_init = refuse
        import passes
        from torch.fx.experimental.proxy_tensor import make_fx
        gm = make_fx(lambda x: (x.view(-1), x[x > 0]), tracing_mode="symbolic")(torch.ones(2, 2))
        print(passes.check(gm).ids)
        print(passes.check_call(torch.nn.Linear(2, 2), (torch.ones(3, 2),)).ok)
        gm = make_fx(lambda x: x.view(-1))(torch.ones(2, 2))
        print(len(passes.apply(gm, [passes.CloneAliasedOutputs((0,))]).graph.nodes))
        print(torch.cuda.is_initialized(), "fxgraph" in sys.modules)
        """
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["('data-dependent-shape',)", "True", "4", "False False"]
