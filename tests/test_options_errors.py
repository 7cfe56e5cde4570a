"""Options: what is allowed, and the one format in which everything is refused."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import fx

import fxgraph
import passes
from fxgraph import FxgraphError, OptionError, Options, errors
from fxgraph.errors import add_note
from passes import Report, Where
from passes.contract_callable import BufferRequiresGrad, NotCallable

FIELDS = {field.name: field.default for field in dataclasses.fields(Options)}
CHOICES = {name: get_args(hint) for name, hint in get_type_hints(Options).items() if get_origin(hint) is Literal}
COUNTS = {"max_captures": 1, "max_in_flight": 1, "min_region_ops": 1, "num_warmup_iters": 0, "verify": 0}

# -- values -----------------------------------------------------------------------------------------------------------


def test_every_option_is_a_choice_a_count_or_passes() -> None:
    assert set(CHOICES) | set(COUNTS) | {"passes"} == set(FIELDS)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, allowed in CHOICES.items() for v in allowed])
def test_allowed_choices(name: str, value: str) -> None:
    assert getattr(Options(**{name: value}), name) == value


@pytest.mark.parametrize("name", CHOICES)
def test_the_first_choice_is_the_default(name: str) -> None:
    assert FIELDS[name] == CHOICES[name][0]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["nonsense", None, 1])
def test_another_choice_is_refused_and_the_allowed_ones_are_listed(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**{name: value})
    error = caught.value
    assert (error.id, error.observed) == ("bad-option", repr(value))
    assert f"'{name}'" in error.where
    assert error.expected == "one of " + ", ".join(map(repr, CHOICES[name]))


@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_counts(name: str, least: int) -> None:
    assert getattr(Options(**{name: least}), name) == least
    assert getattr(Options(**{name: 100}), name) == 100
    for value in (least - 1, 1.0, "2", True, None):
        with pytest.raises(OptionError) as caught:
            Options(**{name: value})
        assert caught.value.id == "bad-option"
        assert caught.value.observed == repr(value)
        assert caught.value.expected == f"an int >= {least}"


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().max_captures = 3  # type: ignore[misc]


ON_ATEN = (
    passes.LowerToAten(),
    passes.Functionalize(),
    passes.RemoveDeadCode(),
    passes.RemoveNoOps(),
    passes.MergeCommonSubexpressions(),
    passes.MoveConstantsToDevice(),
    passes.CloneAliasedOutputs((0,)),
    passes.MergeInputCopies(),
    passes.DrawInPlace(),
)


def test_all_shipped_passes_are_on_aten_operators() -> None:
    shipped = {one for one in vars(passes).values() if isinstance(one, type) and issubclass(one, passes.Pass)}
    assert {type(one) for one in ON_ATEN} == shipped - {passes.Pass}


@pytest.mark.parametrize("one", ON_ATEN, ids=lambda one: type(one).__name__)
def test_a_pass_on_aten_operators_is_refused_with_what_options_take(one: passes.Pass) -> None:
    with pytest.raises(OptionError) as caught:
        Options(passes=(relu_to_gelu, one))
    assert (caught.value.id, caught.value.observed) == ("bad-option", one.name)
    assert "in a function of a torch.fx.GraphModule" in caught.value.hint


def relu_to_gelu(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
        node.target = torch.nn.functional.gelu
    gm.recompile()


def test_the_hint_on_passes_can_be_followed() -> None:
    graphed = fxgraph.make_graphed_callables(
        lambda x: torch.relu(x) * 2, (torch.ones(3),), options={"passes": [relu_to_gelu]}
    )
    x = torch.tensor([-1.0, 0.0, 1.0])
    assert torch.equal(graphed(x), torch.nn.functional.gelu(x) * 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (relu_to_gelu, "a list of passes: each takes a torch.fx.GraphModule"),
        ([3], "3 of type int is no pass"),
        ([passes.RemoveDeadCode], "write RemoveDeadCode(...)"),
    ],
)
def test_what_are_no_passes_is_refused(given: Any, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options(passes=given)
    assert caught.value.id == "bad-option"
    assert words in caught.value.expected


# -- from what the user gives -----------------------------------------------------------------------------------------


def test_options_from_nothing_an_instance_or_a_mapping() -> None:
    assert Options.of(None) == Options()
    assert Options.of({}) == Options()
    assert Options.of({"max_captures": 3}) == Options(max_captures=3)
    assert Options.of(Options(max_captures=3), num_warmup_iters=5) == Options(max_captures=3, num_warmup_iters=5)
    assert Options.of({"max_captures": 3}, num_warmup_iters=5) == Options(max_captures=3, num_warmup_iters=5)


def test_the_given_options_are_not_changed() -> None:
    given = {"max_captures": 3}
    Options.of(given, num_warmup_iters=5)
    assert given == {"max_captures": 3}


def test_unknown_options_are_named_and_the_allowed_names_listed() -> None:
    with pytest.raises(OptionError) as caught:
        Options.of({"max_captures": 3, "max_capture": 3, "trees": True})
    error = caught.value
    assert error.id == "unknown-option"
    assert error.observed == "'max_capture', 'trees'"
    assert error.expected == "names among " + ", ".join(FIELDS)


@pytest.mark.parametrize("given", [["max_captures"], "max_captures", 3, {"max_captures"}])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Options.of(given)
    assert caught.value.id == "bad-option"
    assert type(given).__name__ in caught.value.observed


# -- errors -----------------------------------------------------------------------------------------------------------

REFUSALS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FxgraphError) and value is not FxgraphError
]


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.__name__)
def test_every_refusal_is_public_and_also_a_built_in_error(kind: type[FxgraphError]) -> None:
    assert getattr(fxgraph, kind.__name__) is kind
    assert kind.__name__ in fxgraph.__all__
    assert issubclass(kind, (ValueError, TypeError, RuntimeError))
    assert kind.__doc__


def test_the_text_has_one_format_and_leaves_out_what_is_not_said() -> None:
    whole = FxgraphError(
        "some-id", "a title", where="file.py:3", observed="this", expected="that", hint="do it", instead="ran eagerly"
    )
    assert str(whole) == (
        "[some-id] a title\n"
        "  where:    file.py:3\n"
        "  observed: this\n"
        "  expected: that\n"
        "  hint:     do it\n"
        "  fxgraph:  ran eagerly"
    )
    assert str(FxgraphError("some-id", "a title", hint="do it")) == "[some-id] a title\n  hint:     do it"
    assert (whole.id, whole.where, whole.observed, whole.expected, whole.hint, whole.violations) == (
        "some-id", "file.py:3", "this", "that", "do it", (),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [FxgraphError, *REFUSALS], ids=lambda kind: kind.__name__)
def test_an_error_of_a_report_says_everything_the_report_says(kind: type[FxgraphError]) -> None:
    one = NotCallable().violation(Where(path="callables[1]"), "an object of type int", "a function")
    two = BufferRequiresGrad().violation(Where(file="net.py", line=7, path="buffer 'b'"), "yes", "no")
    error = kind.from_report(Report((one, two)))
    assert type(error) is kind
    assert str(error) == str(Report((one, two)))
    assert error.violations == (one, two)
    assert (error.id, error.title, error.where) == (one.id, one.title, "callables[1]")
    assert (error.observed, error.expected, error.hint) == (one.observed, one.expected, one.hint)


@pytest.mark.parametrize(
    "error",
    [
        FxgraphError("some-id", "a title", where="here", observed="this"),
        OptionError.from_report(Report((NotCallable().violation(Where(path="x"), "an int", "a function"),))),
    ],
    ids=["made", "from a report"],
)
def test_an_error_survives_pickling_as_between_worker_processes(error: FxgraphError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.id, again.where, again.observed) == (error.id, error.where, error.observed)


def test_add_note_adds_to_what_is_there() -> None:
    error = ValueError("own")
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_add_note_where_python_has_none() -> None:
    class Old(Exception):
        add_note = property()  # hasattr is False, as on Python 3.10

    error = Old("own")
    assert not hasattr(error, "add_note")
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]  # type: ignore[attr-defined]
