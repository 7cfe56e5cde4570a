"""Well-formedness of graphs, and graphs as text."""

from __future__ import annotations

import inspect
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Tracer, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from passes import WELL_FORMED, Constraint, check
from passes.show import diff, mark, show, show_node, show_report, show_value
from passes.verify import AtenLevel, HasFakeValues, Recompiled, verify
from passes.verify_calls import ON_CHANGED, CurrentFakeValue, FitsSchema

aten = torch.ops.aten
RULES: dict[str, Constraint[GraphModule]] = {
    rule.id: rule for rule in (*WELL_FORMED, *ON_CHANGED, AtenLevel(), HasFakeValues())
}
PAIR = tuple[GraphModule, GraphModule, str]


ADD = "torch.ops.aten.add.Tensor"
UNORDERED = (
    "Argument 'add' of Node 'output' was used before it has been defined! "
    "Please check that Nodes in the graph are topologically ordered"
)


def add_one() -> GraphModule:
    return make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(2))


def call_of(gm: GraphModule) -> Any:
    return next(node for node in gm.graph.nodes if node.op.startswith("call_"))


# -- triples ----------------------------------------------------------------------------------------------------------


def _lint() -> PAIR:
    bad = add_one()
    call = call_of(bad)
    bad.graph.output_node().append(call)  # now after the output, which reads it
    good = add_one()
    placeholder = next(iter(good.graph.nodes))
    placeholder.append(call_of(good))
    message = f"""
        [lint] the graph is malformed
          where:    unknown place
          observed: {UNORDERED}
                    graph():
                        %x_1 : [num_users=1] = placeholder[target=x_1]
                        return add
                        %add : [num_users=1] = call_function[target={ADD}](args = (%x_1, 1), kwargs = {{}})
          expected: graph.lint() accepts it
          hint:     insert nodes before their users, and erase a node only once it has none
        """
    return bad, good, message


def _fits() -> PAIR:
    bad, good = add_one(), add_one()
    call_of(bad).args = (*call_of(bad).args, 2)
    call_of(good).kwargs = {"alpha": 2}
    message = """
        [fits-schema] a call does not fit the operator's schema
          where:    node add
          observed: aten.add.Tensor with 3 arguments by place, at most 2 are taken
          expected: aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
          hint:     give each argument of the schema once, and no others
        """
    return bad, good, message


def _stale() -> PAIR:
    bad, good = add_one(), add_one()
    call_of(bad).target = aten.eq.Scalar
    call_of(good).target = aten.sub.Tensor
    message = """
        [stale-fake-value] a node's fake value is not what its call gives
          where:    node add
          observed: aten.eq.Scalar with the value f32[2] cpu
          expected: b8[2] cpu
          hint:     set meta['val'] anew on each node that a pass changes, and on those that read it
        """
    return bad, good, message


def _placeholders() -> PAIR:
    bad, good = add_one(), add_one()
    with bad.graph.inserting_after(call_of(bad)):
        bad.graph.placeholder("late")
    with good.graph.inserting_before(call_of(good)):
        good.graph.placeholder("second")
    message = """
        [placeholders-first] a placeholder follows another kind of node
          where:    node late
          observed: placeholder after call_function add
          expected: placeholders come first
          hint:     insert placeholders before the first node that is none
        """
    return bad, good, message


def _one_output() -> PAIR:
    bad, good = add_one(), add_one()
    bad.graph.erase_node(bad.graph.output_node())
    message = """
        [one-output] the graph does not end with one output
          where:    unknown place
          observed: 0 output nodes
          expected: one output node
          hint:     keep one output node, last
        """
    return bad, good, message


def _missing() -> PAIR:
    bad, good = add_one(), add_one()
    del call_of(bad).meta["val"]
    for node in good.graph.nodes:  # a graph that never had values is well formed
        node.meta.clear()
    message = """
        [missing-fake-value] a node has no fake value although its inputs have one
          where:    node add
          observed: aten.add.Tensor without meta['val']; x_1 with it
          expected: meta['val'] on every call
          hint:     set meta['val'] on each node that a pass creates
        """
    return bad, good, message


def _written_back(read_first: bool) -> GraphModule:
    gm = add_one()
    placeholder, call = next(iter(gm.graph.nodes)), call_of(gm)
    with gm.graph.inserting_before(gm.graph.output_node()):
        write = gm.graph.call_function(aten.copy_.default, (placeholder, call))
        read = gm.graph.call_function(aten.neg.default, (placeholder,))
    write.meta["val"] = read.meta["val"] = call.meta["val"]
    if read_first:
        write.prepend(read)
    gm.graph.output_node().args = (read,)
    gm.recompile()
    return gm


def _write_back() -> PAIR:
    message = """
        [read-after-write-back] an input is read after it was written back
          where:    node neg_default
          observed: neg_default reads x_1 after copy__default wrote it
          expected: copy__default after every reader of x_1
          hint:     keep write-backs behind every other reader, or read the result of the copy
        """
    return _written_back(read_first=False), _written_back(read_first=True), message


def _recompiled() -> PAIR:
    bad, good = add_one(), add_one()
    for gm in (bad, good):
        call_of(gm).args = (call_of(gm).args[0], 2)
    good.recompile()
    message = """
        [recompiled] the code is not that of the graph
          where:    unknown place
          observed: the graph has 'add = torch.ops.aten.add.Tensor(x_1, 2);  x_1 = None', the code does not
          expected: the same lines in both
          hint:     call graph_module.recompile() after changing the graph
        """
    return bad, good, message


def _aten() -> PAIR:
    message = """
        [aten-level] a call is not an operator
          where:    node add
          observed: call_function operator.add
          expected: a call of torch.ops
          hint:     apply LowerToAten() first, or trace with make_fx or AOTAutograd
        """
    return symbolic_trace(lambda x: x + 1), add_one(), message


def _values() -> PAIR:
    bad = symbolic_trace(lambda x: x + 1)
    message = """
        [has-fake-values] a node has no fake value
          where:    node x
          observed: placeholder x without meta['val']
          expected: meta['val'] on it
          hint:     apply LowerToAten(example_inputs) first, or trace with make_fx or AOTAutograd
        """
    return bad, add_one(), message


TRIPLES: dict[str, Callable[[], PAIR]] = {
    "lint": _lint,
    "fits-schema": _fits,
    "stale-fake-value": _stale,
    "placeholders-first": _placeholders,
    "one-output": _one_output,
    "missing-fake-value": _missing,
    "read-after-write-back": _write_back,
    "recompiled": _recompiled,
    "aten-level": _aten,
    "has-fake-values": _values,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_smallest_violation_the_nearest_non_violation_and_the_message(rule: Constraint[GraphModule]) -> None:
    bad, good, message = TRIPLES[rule.id]()
    first = next(iter(rule.violations(bad)))
    wanted = textwrap.dedent(message).strip().splitlines()
    # torch prints the whole graph below its complaint; whether lines of it end in blanks differs between versions
    assert [line.rstrip() for line in str(first).splitlines() if line.strip()] == wanted
    assert rule.verdict(good)


def test_the_table_has_no_row_for_a_rule_that_does_not_exist() -> None:
    assert set(TRIPLES) == set(RULES)


def test_a_node_behind_the_output_is_named() -> None:
    gm = add_one()
    gm.graph.output_node().append(gm.graph.call_function(aten.neg.default, (next(iter(gm.graph.nodes)),)))
    (violation,) = RULES["one-output"].violations(gm)
    assert (violation.observed, violation.expected) == ("neg_default follows the output", "the output node is last")


def test_a_write_back_whose_result_is_read_is_an_ordinary_op() -> None:
    gm = _written_back(read_first=False)
    write = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)[0]
    gm.graph.output_node().args = ((gm.graph.output_node().args[0], write),)
    gm.recompile()
    assert verify(gm)


def test_recompiled_sees_a_removed_line_too() -> None:
    gm = make_fx(lambda x: (x.neg(), x + 1)[1])(torch.ones(2))
    neg = next(node for node in gm.graph.nodes if node.target is aten.neg.default)
    gm.graph.erase_node(neg)
    assert not Recompiled().verdict(gm)


@pytest.mark.parametrize(
    ("args", "kwargs", "observed"),
    [
        (2, {"alpha": 2}, None),
        (1, {"other": 1}, None),
        (1, {}, "aten.add.Tensor without 'other'"),
        (2, {"other": 1}, "aten.add.Tensor with 'other' given twice"),
        (2, {"beta": 1}, "aten.add.Tensor with an argument 'beta', which it does not have"),
    ],
)
def test_each_way_in_which_arguments_do_not_fit(args: int, kwargs: dict[str, int], observed: str | None) -> None:
    gm = add_one()
    call = call_of(gm)
    call.args, call.kwargs = call.args[:args], kwargs
    found = [violation.observed for violation in FitsSchema().violations(gm)]
    assert found == ([] if observed is None else [observed])


def test_a_call_that_fails_on_the_values_of_its_arguments_is_told_with_what_it_says() -> None:
    gm = make_fx(lambda x, y: x @ y, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3, 2))
    call = call_of(gm)
    assert CurrentFakeValue().verdict(gm)
    call.args = (call.args[0], call.args[0])
    (violation,) = CurrentFakeValue().violations(gm)
    assert violation.observed.startswith("aten.mm.default raises RuntimeError: ")
    assert "2x3" in violation.observed.replace(" ", "") or "[2,3]" in violation.observed.replace(" ", "")


@pytest.mark.parametrize("entered", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad])
def test_modes_in_which_a_graph_is_judged_do_not_change_what_its_calls_give(entered: Callable[[], Any]) -> None:
    gm = make_fx(lambda x: (x @ x).sum(0), tracing_mode="fake")(torch.ones(2, 2))
    with entered():
        assert CurrentFakeValue().verdict(gm)


@pytest.mark.parametrize("mode", ["symbolic", "fake"])
def test_values_that_depend_on_data_or_symbols_are_not_judged(mode: str) -> None:
    gm = make_fx(lambda x: torch.relu(x) + x.sum(), tracing_mode=mode)(torch.ones(3, 4))
    (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.target = aten.gt.Scalar
    relu.args = (*relu.args, 0)
    assert bool(CurrentFakeValue().verdict(gm)) is (mode == "symbolic")
    relu.target, relu.args = aten.nonzero.default, relu.args[:1]
    assert CurrentFakeValue().node_verdict(relu)


@pytest.mark.parametrize(("op", "target"), [("call_function", "relu"), ("call_method", torch.relu)])
def test_what_cannot_be_called_is_a_violation_rather_than_an_error_of_the_printer(op: str, target: Any) -> None:
    gm = add_one()
    call = call_of(gm)
    call.op, call.target = op, target
    assert verify(gm).ids == ("lint", "recompiled")
    assert "Node add target" in verify(gm).violations[0].observed


class Holder(torch.nn.Module):
    pass


@pytest.mark.parametrize("judged", [check, verify, CurrentFakeValue().verdict])
@pytest.mark.parametrize(
    ("subject", "how"),
    [
        (Holder(), "trace it first"),
        (lambda x: x, "trace it first"),
        (Graph(), "wrap it"),
        (None, "trace it first"),
    ],
)
def test_what_is_no_graph_module_is_refused_with_how_to_get_one(judged: Any, subject: Any, how: str) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.fx.GraphModule, got an object of type .*" + how) as caught:
        judged(subject)
    assert type(subject).__qualname__ in str(caught.value)


def test_an_exported_program_is_told_which_of_its_graphs_is_meant() -> None:
    with pytest.raises(TypeError, match=r"type .*ExportedProgram: take exported.module\(\)"):
        check(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)))  # type: ignore[arg-type]


# -- every tracer -----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.bn = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.linear(x))).sum(0)


def _dynamo() -> GraphModule:
    recorder = EagerAndRecordGraphs()
    torch.compile(Net(), backend=recorder, fullgraph=True)(torch.ones(3, 4))
    return recorder.graphs[0]


def _joint() -> GraphModule:
    def loss(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.relu(x @ w).sum(),)

    return aot_export_joint_simple(loss, (torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)), trace_joint=True)


TRACERS: dict[str, Callable[[], GraphModule]] = {
    "symbolic_trace": lambda: symbolic_trace(Net()),
    "make_fx": lambda: make_fx(lambda x: torch.relu(x) @ x.t(), tracing_mode="symbolic")(torch.ones(3, 4)),
    "export": lambda: torch.export.export(Net(), (torch.ones(3, 4),)).module(),
    "dynamo": _dynamo,
    "joint": _joint,
}


@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS.keys())
def test_the_graphs_of_every_tracer_are_well_formed_and_capturable(trace: Callable[[], GraphModule]) -> None:
    gm = trace()
    assert str(verify(gm)) == "no violations"
    assert str(check(gm)) == "no violations"
    assert len(show(gm).splitlines()) == len(gm.graph.nodes)


@pytest.mark.parametrize("name", ["make_fx", "joint"])
def test_graphs_of_aten_tracers_are_at_aten_level_with_values(name: str) -> None:
    gm = TRACERS[name]()
    assert AtenLevel().verdict(gm)
    assert HasFakeValues().verdict(gm)


# -- text -------------------------------------------------------------------------------------------------------------


GOLDEN = """\
%x_1 : f32[2, 3] cpu = placeholder
%y_1 : f64[2, 3] cpu = placeholder
%t : f32[3, 2] strides (1, 3) cpu = aten.t.default(%x_1)
%select : f64[3] cpu = aten.select.int(%y_1, 0, 0)
%gt : b8[3] cpu = aten.gt.Scalar(%select, 0)
%split : (f32[2, 3] cpu) = aten.split.Tensor(%x_1, 2)
%getitem : f32[2, 3] cpu = operator.getitem(%split, 0)
%masked_fill : f32[2, 3] cpu = aten.masked_fill.Scalar(%getitem, %gt, 1.5)
return (%t, %masked_fill, None)"""


def golden_program() -> GraphModule:
    def body(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = x.t()
        mask = y[0] > 0
        return t, x.split(2)[0].masked_fill(mask, 1.5), None

    return make_fx(body, tracing_mode="fake")(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64))


def test_a_graph_as_text() -> None:
    assert show(golden_program()) == GOLDEN


def test_a_mark_stands_under_its_node() -> None:
    gm = golden_program()
    node = next(node for node in gm.graph.nodes if node.name == "gt")
    lines = mark(node, "here").splitlines()
    assert lines[4] == "%gt : b8[3] cpu = aten.gt.Scalar(%select, 0)"
    assert lines[5] == "^" * len(lines[4]) + " here"
    assert [*lines[:5], *lines[6:]] == GOLDEN.splitlines()
    assert mark(node).splitlines()[5] == "^" * len(lines[4])


def test_a_line_ends_with_the_users_place() -> None:
    def forward(x: Any) -> Any:
        return x.relu()

    tracer = Tracer()
    tracer.record_stack_traces = True
    gm = GraphModule(torch.nn.Module(), tracer.trace(forward))
    line = inspect.getsourcelines(forward)[1] + 1
    assert show_node(call_of(gm)) == f"%relu = Tensor.relu(%x)  # test_verify_show.py:{line}"


def test_a_report_is_shown_in_the_graph() -> None:
    gm = make_fx(lambda x: x[x > 0], tracing_mode="symbolic")(torch.ones(3))
    report = check(gm)
    lines = show_report(gm, report).splitlines()
    marked = next(index for index, line in enumerate(lines) if line.startswith("^^^^"))
    assert lines[marked - 1].endswith("= aten.index.Tensor(%x_1, [%gt])")
    assert lines[marked].endswith("^ [data-dependent-shape] aten.index.Tensor with the boolean mask gt")
    assert lines[marked].count("^") == len(lines[marked - 1])
    assert "\n".join(lines).endswith(str(report))


def test_a_diff_shows_what_changed_and_is_empty_where_nothing_did() -> None:
    before = add_one()
    after = add_one()
    call_of(after).args = (call_of(after).args[0], 2)
    assert diff(show(before), show(add_one())) == ""
    assert diff(show(before), show(after), "Two()").splitlines() == [
        "--- before Two()",
        "+++ after Two()",
        "@@ -1,3 +1,3 @@",
        " %x_1 : f32[2] cpu = placeholder",
        "-%add : f32[2] cpu = aten.add.Tensor(%x_1, 1)",
        "+%add : f32[2] cpu = aten.add.Tensor(%x_1, 2)",
        " return %add",
    ]


def test_values_are_short_and_strides_are_given_where_they_matter() -> None:
    with FakeTensorMode():
        values = {
            "f32[] cpu": torch.empty(()),
            "bf16[2, 3] cuda:0": torch.empty(2, 3, dtype=torch.bfloat16, device="cuda"),
            "f32[2, 3] strides (1, 2) cpu": torch.empty(3, 2).t(),
            "f32[1, 3] cpu": torch.empty(3, 1).t(),
            "f32[0, 3] cpu": torch.empty(3, 0).t(),
            "f32[2, 3] strides (0, 1) cpu": torch.empty(3).expand(2, 3),
            "(i64[2] cpu, none)": (torch.empty(2, dtype=torch.int64), None),
            "int 3": 3,
            "": None,
        }
    assert {show_value(value): value for value in values.values()}.keys() == values.keys()


def test_odd_arguments_are_shown() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    held = graph.get_attr("deep.weight")
    item = graph.call_function(operator.getitem, (x, (slice(None, 2, None), ..., held)))
    call = graph.call_method("add", (item,), {"other": {"k": x, "n": [x, (1,)]}})
    graph.output({"y": call})
    lines = [show_node(node) for node in graph.nodes]
    assert lines[1:] == [
        "%deep_weight = get_attr deep.weight",
        "%getitem = operator.getitem(%x, (slice(None, 2, None), Ellipsis, %deep_weight))",
        "%add = Tensor.add(%getitem, other={'k': %x, 'n': [%x, (1,)]})",
        "return {'y': %add}",
    ]


def test_symbolic_sizes_are_shown_without_adding_guards() -> None:
    gm = make_fx(lambda x: (x.t(), x[None].transpose(0, 1).expand(-1, 5, -1)), tracing_mode="symbolic")(
        torch.ones(3, 4)
    )
    placeholder = next(node for node in gm.graph.nodes if node.op == "placeholder")
    environment = placeholder.meta["val"].fake_mode.shape_env
    before = len(environment.guards)
    lines = show(gm).splitlines()
    assert len(environment.guards) == before
    rows, columns = placeholder.meta["val"].shape
    assert f"%x_1 : f32[{rows}, {columns}] cpu = placeholder" in lines
    assert f"%t : f32[{columns}, {rows}] strides (1, {columns}) cpu = aten.t.default(%x_1)" in lines
