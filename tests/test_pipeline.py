"""Passes and their driver: verification around each pass, timing, diffs, and an error that names the guilty one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from passes import (
    CloneAliasedOutputs,
    Constraint,
    LowerToAten,
    MoveConstantsToDevice,
    Pass,
    PassError,
    Pipeline,
    Where,
    apply,
)
from passes.pipeline import copy_graph_module, pass_name
from passes.show import show

aten = torch.ops.aten


@dataclass(frozen=True)
class FewNodes(Constraint[GraphModule]):
    """At most ``limit`` nodes."""

    id: ClassVar[str] = "few-nodes"
    title: ClassVar[str] = "the graph is large"
    why: ClassVar[str] = "the test says so"
    hint: ClassVar[str] = "remove some"
    limit: int = 3

    def violations(self, subject: GraphModule) -> Any:
        count = len(subject.graph.nodes)
        if count > self.limit:
            yield self.violation(Where(), f"{count} nodes", f"at most {self.limit}")


@dataclass(frozen=True)
class ReplaceConstant(Pass):
    """``x + 1`` becomes ``x + number``."""

    number: int = 2

    def rewrite(self, gm: GraphModule) -> bool:
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if node.args[1] == 1:
                node.args = (node.args[0], self.number)
                changed = True
        return changed


@dataclass(frozen=True)
class AddNode(Pass):
    """Adds a dead node, against its own promise."""

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (FewNodes(4),)
    ensures: ClassVar[tuple[Constraint[GraphModule], ...]] = (FewNodes(3),)

    def rewrite(self, gm: GraphModule) -> bool:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            gm.graph.call_function(aten.neg.default, (output.args[0],)).meta["val"] = output.args[0].meta["val"]
        return True


class Torchs(PassBase):
    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(graph_module, ReplaceConstant(3).rewrite(graph_module) and not graph_module.recompile())


def in_place(gm: GraphModule) -> None:
    ReplaceConstant(4)(gm)


def returning(gm: GraphModule) -> GraphModule:
    ReplaceConstant(5)(gm)
    return gm


def forgets_to_recompile(gm: GraphModule) -> GraphModule:
    ReplaceConstant(6).rewrite(gm)
    return gm


def raises_midway(gm: GraphModule) -> None:
    ReplaceConstant(7)(gm)
    raise KeyError("lost")


def returns_nonsense(gm: GraphModule) -> Any:
    return 3


def add_one() -> GraphModule:
    return make_fx(lambda x: x + 1, tracing_mode="fake")(torch.zeros(2))


DIFF = """\
--- before {name}
+++ after {name}
@@ -1,3 +1,3 @@
 %x_1 : f32[2] cpu = placeholder
-%add : f32[2] cpu = aten.add.Tensor(%x_1, 1)
+%add : f32[2] cpu = aten.add.Tensor(%x_1, {number})
 return %add"""


@pytest.mark.parametrize(
    ("one", "name", "number"),
    [
        (ReplaceConstant(), "ReplaceConstant(number=2)", 2),
        (Torchs(), "Torchs", 3),
        (in_place, f"{__name__}.in_place", 4),
        (returning, f"{__name__}.returning", 5),
    ],
)
def test_every_kind_of_pass_is_accepted_and_its_diff_is_kept(one: Any, name: str, number: int) -> None:
    gm = add_one()
    result = Pipeline((one,))(gm)
    assert result.graph_module(torch.zeros(2)).tolist() == [number, number]
    (step,) = result.steps
    assert (step.name, step.modified, step.diff) == (name, True, DIFF.format(name=name, number=number))
    assert 0 < step.seconds < 60
    assert result.modified


def test_the_given_graph_is_left_untouched() -> None:
    gm = add_one()
    before = show(gm), gm.code
    rewritten = apply(gm, [ReplaceConstant()])
    assert (show(gm), gm.code) == before
    assert gm(torch.zeros(1)).item() == 1
    assert rewritten(torch.zeros(1)).item() == 2


def test_passes_run_in_order_and_an_unchanged_graph_is_said_to_be_so() -> None:
    result = Pipeline((ReplaceConstant(8), ReplaceConstant(9)))(add_one())
    assert [step.modified for step in result.steps] == [True, False]
    assert result.steps[1].diff == ""
    assert result.graph_module(torch.zeros(1)).item() == 8
    lines = str(result).splitlines()
    assert [line.split(" ms  ")[1] for line in lines] == [
        "changed    ReplaceConstant(number=8)",
        "unchanged  ReplaceConstant(number=9)",
    ]


def test_no_passes_give_an_equal_graph_that_is_not_the_same() -> None:
    gm = add_one()
    result = Pipeline(())(gm)
    assert (result.modified, result.steps) == (False, ())
    assert result.graph_module is not gm
    assert show(result.graph_module) == show(gm)


def test_a_graph_that_returns_nothing_keeps_its_output_node() -> None:
    gm = make_fx(lambda x: [x.add_(1)].clear(), tracing_mode="fake")(torch.zeros(1))
    x = torch.zeros(1)
    assert apply(gm, [])(x) is None
    assert x.item() == 1


def error_of(*passes: Any, gm: GraphModule | None = None, **options: Any) -> PassError:
    with pytest.raises(PassError) as caught:
        Pipeline(passes, **options)(add_one() if gm is None else gm)
    return caught.value


def test_a_pass_that_leaves_a_malformed_graph_is_named_with_the_rule_and_the_diff() -> None:
    error = error_of(ReplaceConstant(1), forgets_to_recompile)
    name = f"{__name__}.forgets_to_recompile"
    assert (error.pass_name, error.stage, error.report.ids) == (name, "verify", ("recompiled",))
    assert error.diff == DIFF.format(name=name, number=6)
    first, *rest = str(error).split("\n\n")
    assert first == f"{name}: the graph is malformed after this pass"
    assert rest == ["1 violation", str(error.report.violations[0]), error.diff]


def test_a_graph_that_is_malformed_from_the_start_is_nobodys_fault() -> None:
    gm = add_one()
    ReplaceConstant().rewrite(gm)
    error = error_of(ReplaceConstant(), gm=gm)
    assert (error.pass_name, error.stage) == ("input", "verify")
    assert str(error).startswith("input: the graph is malformed before the first pass\n\n1 violation\n\n[recompiled]")


def test_what_a_pass_raises_is_the_cause_and_what_it_had_changed_is_shown() -> None:
    error = error_of(raises_midway)
    assert (error.pass_name, error.stage) == (f"{__name__}.raises_midway", "run")
    assert isinstance(error.__cause__, KeyError)
    assert error.diff == DIFF.format(name=error.pass_name, number=7)
    code = raises_midway.__code__
    assert error.hint == (
        f"it comes from {code.co_filename}:{code.co_firstlineno + 2} (raises_midway); correct the pass, or leave it out"
    )
    head = f"{__name__}.raises_midway: raised KeyError: 'lost'\n  hint:     {error.hint}"
    assert str(error).startswith(f"{head}\n\n--- before")


def test_a_pass_that_returns_something_else_is_refused() -> None:
    error = error_of(returns_nonsense)
    first, second = str(error).splitlines()
    assert first == f"{__name__}.returns_nonsense: returned int, expected a GraphModule, a PassResult or None"
    assert second == "  hint:     return the GraphModule, or nothing for a change in place"


@dataclass(frozen=True)
class SaysNothing(Pass):
    """Changes the graph and does not say so."""

    returned: Any = None

    def rewrite(self, gm: GraphModule) -> bool:
        ReplaceConstant(3).rewrite(gm)
        return self.returned


@pytest.mark.parametrize("returned", [None, 1, "changed"])
@pytest.mark.parametrize("driven", [True, False])
def test_a_rewrite_that_does_not_say_whether_it_changed_anything_is_refused(returned: Any, driven: bool) -> None:
    one = SaysNothing(returned)
    with pytest.raises(PassError) as caught:
        apply(add_one(), [one]) if driven else one(add_one())
    assert (caught.value.pass_name, caught.value.stage) == (one.name, "run")
    assert caught.value.problem == f"rewrite() returned {returned!r}, expected True or False"
    assert caught.value.hint == "return whether it changed anything"


def test_a_rewrite_that_denies_its_change_is_refused() -> None:
    error = error_of(SaysNothing(False))
    assert (error.stage, error.report.ids) == ("verify", ("recompiled",))


@dataclass(frozen=True)
class Disorders(Pass):
    """Moves what is returned behind the output."""

    def rewrite(self, gm: GraphModule) -> bool:
        output = gm.graph.output_node()
        output.append(output.args[0])
        return True


@pytest.mark.parametrize("driven", [True, False])
def test_a_rewrite_that_leaves_what_torch_refuses_is_named(driven: bool) -> None:
    with pytest.raises(PassError) as caught:
        apply(add_one(), [Disorders()]) if driven else Disorders()(add_one())
    assert (caught.value.pass_name, caught.value.stage) == ("Disorders()", "verify")
    assert "lint" in caught.value.report.ids


class Forgetful(PassBase):
    """Leaves recompiling to the driver, as torch's PassManager lets a pass do."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def call(self, graph_module: GraphModule) -> Any:
        changed = ReplaceConstant(6).rewrite(graph_module)
        return PassResult(graph_module, changed) if self.returned else None


@pytest.mark.parametrize("returned", [True, False])
def test_torchs_passes_need_not_recompile(returned: bool) -> None:
    result = Pipeline((Forgetful(returned), ReplaceConstant()))(add_one())
    assert [step.modified for step in result.steps] == [True, False]
    assert result.graph_module(torch.zeros(1)).item() == 6


def stale(gm: GraphModule) -> None:
    (add,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.target = aten.eq.Scalar
    gm.recompile()


def test_what_a_pass_changes_must_have_the_value_that_it_gives() -> None:
    error = error_of(stale)
    assert (error.pass_name, error.stage, error.report.ids) == (f"{__name__}.stale", "verify", ("stale-fake-value",))
    gm = add_one()
    stale(gm)  # from before the first pass: values are not judged anew on every graph
    assert not Pipeline((in_place,))(gm).modified


def call_of(gm: GraphModule) -> Any:
    return next(node for node in gm.graph.nodes if node.op == "call_function")


def another_value(gm: GraphModule) -> None:
    call_of(gm).meta["val"] = call_of(gm).meta["val"].sum()


def erases_the_output(gm: GraphModule) -> None:
    gm.graph.erase_node(gm.graph.output_node())


def reads_another_graph(gm: GraphModule) -> None:
    call_of(gm).args = (call_of(add_one()), 1)


def reads_itself(gm: GraphModule) -> None:
    call_of(gm).args = (call_of(gm), 1)


def calls_a_name(gm: GraphModule) -> None:
    call_of(gm).target = "add"


def calls_nothing(gm: GraphModule) -> None:
    call_of(gm).op = "call_nothing"


def names_what_is_not_there(gm: GraphModule) -> None:
    call = call_of(gm)
    call.op, call.target = "get_attr", "not_there"
    call.args = ()


def passes_an_object(gm: GraphModule) -> None:
    call_of(gm).args = (call_of(gm).args[0], object())


def passes_too_much(gm: GraphModule) -> None:
    call_of(gm).args = (*call_of(gm).args, 1)


def loses_metadata(gm: GraphModule) -> None:
    call_of(gm).meta = None


def loses_the_graph(gm: GraphModule) -> None:
    del gm._graph


BROKEN = (
    *(another_value, erases_the_output, reads_another_graph, reads_itself, calls_a_name, calls_nothing),
    *(names_what_is_not_there, passes_an_object, passes_too_much, loses_metadata, loses_the_graph),
)


@pytest.mark.parametrize("recompiled", [True, False])
@pytest.mark.parametrize("broken", BROKEN)
def test_however_a_pass_breaks_a_graph_it_is_named(broken: Any, recompiled: bool) -> None:
    def guilty(gm: GraphModule) -> None:
        broken(gm)
        if recompiled:
            gm.recompile()

    gm = add_one()
    error = error_of(guilty, gm=gm)
    assert error.pass_name.endswith("guilty")
    assert error.hint or error.report.violations
    assert gm(torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ReplaceConstant(), r"ReplaceConstant\(number=2\) of type ReplaceConstant: write \[one\]"),
        (Torchs(), r"of type Torchs: write \[one\]"),
        ("dead code", r"'dead code' of type str"),
        (3, r"3 of type int"),
        ([ReplaceConstant], r"ReplaceConstant is a class of passes, not a pass: write ReplaceConstant\(...\)"),
        ([Torchs], r"Torchs is a class of passes"),
        ([None], r"None of type NoneType is no pass"),
        (["dead code"], r"'dead code' of type str is no pass"),
    ],
)
@pytest.mark.parametrize("entry", [lambda gm, given: apply(gm, given), lambda gm, given: Pipeline(given)(gm)])
def test_what_are_no_passes_is_said_before_anything_runs(entry: Any, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        entry(add_one(), given)


@pytest.mark.parametrize("entry", [lambda gm: apply(gm, []), Pipeline(()), ReplaceConstant()])
def test_passes_work_on_graph_modules_alone(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.fx.GraphModule, got .*Linear: trace it first"):
        entry(torch.nn.Linear(2, 2))


def test_a_function_of_the_program_that_is_run_keeps_the_name_of_its_module() -> None:
    def own(gm: GraphModule) -> None: ...

    own.__module__, own.__qualname__ = "__main__", "own"
    assert pass_name(own) == "__main__.own"
    own.__module__ = "_private"
    assert pass_name(own) == "private.own"


class Applied:
    def __call__(self, gm: GraphModule) -> None: ...


def test_an_object_that_is_called_goes_by_the_name_of_its_class() -> None:
    assert pass_name(Applied()) == f"{__name__}.Applied"
    assert pass_name(functools.partial(returning)) == f"functools.partial of {__name__}.returning"


def test_what_a_pass_promises_is_judged_on_what_it_returned() -> None:
    error = error_of(AddNode())
    assert (error.pass_name, error.stage, error.report.ids) == ("AddNode()", "ensures", ("few-nodes",))
    assert error.report.violations[0].observed == "4 nodes"
    assert "+%neg_default : f32[2] cpu = aten.neg.default(%add)" in error.diff
    assert str(error).startswith("AddNode(): the result breaks what this pass promises\n\n1 violation")


def test_what_a_pass_requires_is_judged_before_it_runs() -> None:
    gm = make_fx(lambda x: x + 1 + 2 + 3, tracing_mode="fake")(torch.zeros(2))
    error = error_of(AddNode(), gm=gm)
    assert (error.stage, error.diff) == ("requires", "")
    assert error.report.violations[0].observed == "5 nodes"


def test_a_pass_alone_works_in_place_and_gives_torchs_result() -> None:
    gm = add_one()
    result = ReplaceConstant()(gm)
    assert isinstance(result, PassResult)
    assert result.graph_module is gm
    assert result.modified
    assert gm(torch.zeros(1)).item() == 2
    assert not ReplaceConstant()(gm).modified


def test_further_rules_can_be_verified_between_passes() -> None:
    assert Pipeline((ReplaceConstant(),), (FewNodes(3),))(add_one()).modified
    error = error_of(ReplaceConstant(), constraints=(FewNodes(2),))
    assert (error.pass_name, error.report.ids) == ("input", ("few-nodes",))


def test_a_pass_that_does_not_say_what_it_rewrites_raises() -> None:
    @dataclass(frozen=True)
    class Silent(Pass):
        """Nothing."""

    error = error_of(Silent())
    assert isinstance(error.__cause__, NotImplementedError)


def test_options_of_a_pass_are_fixed_and_in_its_name() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReplaceConstant().number = 3  # type: ignore[misc]
    assert pass_name(ReplaceConstant(5)) == "ReplaceConstant(number=5)"
    assert ReplaceConstant(5) == ReplaceConstant(5)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.bn = torch.nn.BatchNorm1d(2)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: Any = None) -> dict[str, torch.Tensor]:
        return {"z": self.bn(self.linear(x)) * self.scale}


GRAPHS: dict[str, Callable[[], GraphModule]] = {
    "symbolic_trace": lambda: symbolic_trace(Net().eval(), concrete_args={"y": None}),
    "export": lambda: torch.export.export(Net().eval(), (torch.ones(3, 2),)).module(),
}


@pytest.mark.parametrize("build", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_copy_shares_parameters_and_modules_and_owns_its_graph(build: Callable[[], GraphModule]) -> None:
    gm = build()
    copied = copy_graph_module(gm)
    assert show(copied) == show(gm)
    assert copied.training is gm.training
    assert [id(value) for value in copied.state_dict(keep_vars=True).values()] == [
        id(value) for value in gm.state_dict(keep_vars=True).values()
    ]
    x = torch.randn(3, 2)
    assert torch.equal(copied(x)["z"], gm(x)["z"])
    for mine, yours in zip(copied.graph.nodes, gm.graph.nodes, strict=True):
        assert mine is not yours
        assert mine.meta is not yours.meta
        assert mine.meta == yours.meta
    expected = gm(x)["z"]
    call = next(
        node for node in reversed(copied.graph.nodes) if node.op == "call_function" and node.name.startswith("mul")
    )
    call.args = (call.args[0], call.args[0])
    copied.recompile()
    assert not torch.equal(copied(x)["z"], expected)
    assert torch.equal(gm(x)["z"], expected)


def test_a_constant_of_an_exported_module_has_one_place_in_the_copy() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.tensor([2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    module = Scaled()
    copied = copy_graph_module(torch.export.export(module, (torch.ones(1),)).module())
    copied._buffers["factor"] = torch.tensor([3.0])  # as torch.func.functional_call does
    assert copied(torch.ones(1)).item() == 3
    assert module.factor.item() == 2


def test_a_copy_keeps_what_the_graph_does_not_name_and_leaves_the_modes_of_submodules_alone() -> None:
    net = Net()
    net.spare = torch.nn.Parameter(torch.ones(1))
    net.register_buffer("scratch", torch.ones(1), persistent=False)
    gm = GraphModule(net, symbolic_trace(net, concrete_args={"y": None}).graph)
    gm.spare, gm.scratch = net.spare, net.scratch
    gm.bn.eval()
    copied = copy_graph_module(gm)
    assert copied.spare is net.spare
    assert set(copied.state_dict()) == set(gm.state_dict())
    assert copied.training and not copied.bn.training and not gm.bn.training


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: LowerToAten(torch.ones(2)), TypeError, r"not Tensor: write LowerToAten\(\(x,\)\) for one"),
        (lambda: LowerToAten("x"), TypeError, r"a tuple of example inputs, not str"),
        (lambda: LowerToAten(add_one()), TypeError, r"LowerToAten\(inputs\)\(gm\)"),
        (lambda: CloneAliasedOutputs(("nope",)), TypeError, r"such as \(0,\), not \('nope',\)"),
        (lambda: CloneAliasedOutputs(0), TypeError, r"such as \(0,\), not 0"),
        (lambda: CloneAliasedOutputs((True,)), TypeError, r"not \(True,\)"),
        (lambda: CloneAliasedOutputs((0, -1)), ValueError, r"from 0, flattened; there are none at \[-1\]"),
        (lambda: MoveConstantsToDevice("table"), TypeError, r"such as \('table',\), not 'table'"),
        (lambda: MoveConstantsToDevice((1,)), TypeError, r"not \(1,\)"),
    ],
)
def test_options_of_a_pass_are_looked_at_when_it_is_made(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_lists_do_as_options_of_a_pass() -> None:
    assert CloneAliasedOutputs([0, 1]) == CloneAliasedOutputs((0, 1))  # type: ignore[arg-type]
    assert MoveConstantsToDevice(["table"]) == MoveConstantsToDevice(("table",))  # type: ignore[arg-type]
    assert LowerToAten([1]).inputs == (1,)  # type: ignore[arg-type]
    assert LowerToAten().inputs is None


def two_results() -> GraphModule:
    return make_fx(lambda x, y: (x + y, [x * y]), tracing_mode="fake")(torch.zeros(1), torch.zeros(1))


def drops_an_output(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    output.args = ((output.args[0][0],),)
    gm.recompile()


def nests_otherwise(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    first, (second,) = output.args[0]
    output.args = ((first, second),)
    gm.recompile()


def takes_another_input(gm: GraphModule) -> None:
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        gm.graph.placeholder("more")
    gm.recompile()


@pytest.mark.parametrize(
    ("one", "inputs", "outputs"),
    [
        (drops_an_output, "x_1, y_1", "1 output in (*,)"),
        (nests_otherwise, "x_1, y_1", "2 outputs in (*, *)"),
        (takes_another_input, "x_1, y_1, more", "2 outputs in (*, [*])"),
    ],
)
def test_a_pass_leaves_inputs_and_outputs_unless_it_is_let(one: Any, inputs: str, outputs: str) -> None:
    error = error_of(one, gm=two_results())
    assert (error.pass_name, error.stage) == (f"{__name__}.{one.__name__}", "verify")
    before = "the inputs x_1, y_1 and 2 outputs in (*, [*])"
    assert error.problem == f"the graph takes and gives the inputs {inputs} and {outputs}, not {before} as before"
    assert "keeps_interface=False" in error.hint
    assert error.diff
    assert Pipeline((one,), keeps_interface=False)(two_results()).modified


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_call_that_a_pass_has_broken_is_found_and_not_logged(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    def untransposed(gm: GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        gm.recompile()

    gm = make_fx(lambda x: x.sin() @ x.t(), tracing_mode=mode)(torch.ones(2, 3))
    error = error_of(untransposed, gm=gm)
    assert error.report.ids == ("stale-fake-value",)
    assert "aten.mm.default raises RuntimeError" in error.report.violations[0].observed
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
