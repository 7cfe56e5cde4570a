"""Every rewrite over random programs: no caller can see a change, the graph stays well-formed, once is enough."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_fx import KINDS, Program, outcome, programs
from torch.utils import _pytree as pytree

from passes import (
    CloneAliasedOutputs,
    Functionalize,
    LowerToAten,
    MergeCommonSubexpressions,
    MergeInputCopies,
    MoveConstantsToDevice,
    PassError,
    Pipeline,
    RemoveDeadCode,
    RemoveNoOps,
)
from passes.verify import verify

KEEP_ALL = (
    LowerToAten(),
    RemoveDeadCode(),
    RemoveNoOps(),
    MergeCommonSubexpressions(),
    MoveConstantsToDevice(),
    MergeInputCopies(),
)
"""Rewrites that work on every ATen graph and keep everything."""


def check_program(program: Program, *passes: Any, identities: bool = True, pre_dispatch: bool = False) -> bool:
    """Assert that the passes keep what a caller sees and that a second time changes nothing; return whether they did
    anything at all.
    """
    gm = program.trace(pre_dispatch=pre_dispatch)
    result = Pipeline(passes)(gm)
    rewritten = result.graph_module
    assert verify(rewritten)
    before, after = outcome(gm, program.arguments()), outcome(rewritten, program.arguments())
    assert after.values == before.values
    assert after.memory == before.memory
    assert (after.structure, after.random) == (before.structure, before.random)
    if identities:
        assert after.same == before.same
    again = Pipeline(passes)(rewritten)
    assert not again.modified, "\n".join(step.diff for step in again.steps)
    return result.modified


@pytest.mark.parametrize("one", KEEP_ALL, ids=lambda one: type(one).__name__)
@given(program=programs(), pre_dispatch=st.booleans())
def test_a_rewrite_keeps_everything_that_a_caller_sees(one: Any, program: Program, pre_dispatch: bool) -> None:
    check_program(program, one, pre_dispatch=pre_dispatch)


@given(program=programs(kinds=("arithmetic", "views", "copies"), max_lines=5, write_back=True))
def test_merged_write_backs_write_the_same(program: Program) -> None:
    check_program(program, MergeInputCopies())


@given(program=programs())
def test_all_of_them_in_a_row(program: Program) -> None:
    gm = program.trace()
    result = Pipeline(KEEP_ALL)(gm)
    assert outcome(result.graph_module, program.arguments()) == outcome(gm, program.arguments())


@given(program=programs())
def test_the_traced_program_is_the_source(program: Program) -> None:
    """Guards the tests above: the graph that they rewrite does what the printed program does."""
    ran, traced = outcome(program.function(), program.arguments()), outcome(program.trace(), program.arguments())
    assert (ran.values, ran.memory, ran.random) == (traced.values, traced.memory, traced.random)


@given(program=programs(), pre_dispatch=st.booleans())
def test_cloned_outputs_own_their_memory_and_keep_their_values(program: Program, pre_dispatch: bool) -> None:
    gm = program.trace(pre_dispatch=pre_dispatch)
    leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
    one = CloneAliasedOutputs(tuple(range(len(leaves))))
    result = Pipeline((one,))(gm).graph_module
    before, after = outcome(gm, program.arguments()), outcome(result, program.arguments())
    # dtype, sizes, bytes; a clone of what overlaps has other strides
    assert [one and (one[0], one[1], one[-1]) for one in map(as_tensor, after.values)] == [
        one and (one[0], one[1], one[-1]) for one in map(as_tensor, before.values)
    ]
    places = [place for place in after.memory[: len(leaves)] if place is not None]
    assert len(set(places)) == len(places)
    assert not set(after.memory[len(leaves) :]) & set(places)
    assert after.random == before.random
    assert not Pipeline((one,))(result).modified


def as_tensor(value: Any) -> Any:
    """A described tensor; None for anything else."""
    return value if isinstance(value, tuple) else None


REFUSALS = (
    "changes sizes or strides in place",
    "two inputs share memory",
    "would have strides",
    "would not share memory",
    "draws into strides",
    "of symbolic size",
    "as another dtype",
)


@given(program=programs(kinds=("in place", "in place", *KINDS)))
def test_functional_form_equals_the_original_or_is_refused_by_name(program: Program) -> None:
    try:
        check_program(program, Functionalize(), identities=False)
    except PassError as error:
        assert isinstance(error.__cause__, ValueError), error
        assert any(text in str(error) for text in REFUSALS), error
