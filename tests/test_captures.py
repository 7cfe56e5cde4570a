"""The sweep of raw captures: it says what a capture did, what the rules say, and where the two differ."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own op database needs it")
pytest.importorskip("tabulate")

from torch.testing._internal.opinfo.core import SampleInput

from conformance import __main__ as command_line
from conformance import captures, captures_table, in_worker, workers
from conformance.captures import AGREE, CAPTURES, FAILS, LAXER, STRICTER, WRONG, Case, Step
from conformance.compare import Strictness


def step_of(function: Any, *tensors: torch.Tensor, **kwargs: Any) -> Step:
    first, *rest = tensors
    return Step(function, SampleInput(first, args=tuple(rest), kwargs=kwargs), backward=True)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


# -- a sample as a function of its tensors ----------------------------------------------------------------------------


def test_a_step_gives_outputs_and_gradients_and_touches_nothing() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    step = step_of(torch.mul, x, y)
    product, dx, dy = step(*step.values)
    ramp = torch.tensor([1.0, 2.0])  # the cotangent
    assert product.tolist() == [3.0, 8.0]
    assert (dx.tolist(), dy.tolist()) == ((ramp * y).tolist(), (ramp * x).tolist())
    assert x.grad is None and y.grad is None and not step.values[0].requires_grad


def test_results_that_are_no_tensors_are_kept_beside() -> None:
    step = step_of(torch.equal, torch.ones(2), torch.ones(2))
    assert step(*step.values) == () and step.constants == [True]


# -- raw captures -----------------------------------------------------------------------------------------------------


def faithful(step: Step, statics: Any) -> captures.Captured:
    """What a right CUDA graph does: replays read the static inputs anew."""
    outputs = step(*statics)

    def replay() -> None:
        for output, again in zip(outputs, step(*statics), strict=True):
            output.copy_(again)

    return outputs, replay


def frozen(step: Step, statics: Any) -> captures.Captured:
    """What a value read on the host comes to: replays give the first result again."""
    return step(*statics), lambda: None


def nothing_written(step: Step, statics: Any) -> captures.Captured:
    return tuple(torch.zeros_like(t) for t in step(*statics)), lambda: None


def broken(step: Step, statics: Any) -> captures.Captured:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def outcome(capture: Any, function: Any = torch.mul) -> str:
    step = step_of(function, leaf(1.0, 2.0), leaf(3.0, 4.0))
    runs = [(v, captures.run_eager(step, v, 1)) for v in (step.values, [t + 1 for t in step.values])]
    return captures.raw(step, runs, Strictness.CLOSE, capture)


def test_a_capture_that_replays_right_captures() -> None:
    assert outcome(faithful) == CAPTURES


def test_a_capture_that_keeps_its_values_is_wrong_on_other_ones() -> None:
    assert outcome(frozen).startswith(f"{WRONG}: on other values: result 0: values")


def test_a_capture_that_writes_nothing_is_wrong_on_the_same_values() -> None:
    assert outcome(nothing_written).startswith(f"{WRONG}: on the same values: result 0: values")


def test_a_capture_that_raises_fails_with_its_first_line() -> None:
    assert outcome(broken) == f"{FAILS}: RuntimeError: operation not permitted when stream is capturing"


def test_a_constant_that_follows_values_is_wrong_on_other_ones() -> None:
    said = outcome(faithful, lambda x, y: (x.sum().item(), x * y))
    assert said.startswith(f"{WRONG}: on other values: result 3: 3.0, eager 5.0")


def test_random_ops_are_compared_by_shape_and_others_by_value() -> None:
    for function, expected in ((torch.bernoulli, Strictness.SHAPES), (torch.neg, Strictness.CLOSE)):
        step = step_of(function, torch.full((64,), 0.5))
        eager = captures.run_eager(step, step.values, 1)
        assert captures.strictness_of(step, step.values, eager, True) is expected
    assert captures.strictness_of(step, step.values, eager, False) is Strictness.SHAPES


def test_inputs_that_overlap_themselves_are_filled_once() -> None:
    static = torch.zeros(2, 1).expand(2, 3)
    captures.refill([static], [torch.ones(2, 1).expand(2, 3)])
    assert static.tolist() == [[1.0] * 3] * 2


def test_memory_that_a_view_leaves_out_is_filled_too() -> None:
    static, value = torch.zeros(4), torch.arange(4.0)
    captures.refill([static[1:3]], [value[1:3]])
    assert static.tolist() == value.tolist()


def test_other_values_must_fit() -> None:
    step = step_of(torch.mul, leaf(1.0, 2.0), leaf(3.0, 4.0))
    fits = SampleInput(leaf(5.0, 6.0), args=(leaf(7.0, 8.0),))
    assert [t.tolist() for t in captures.others(step, fits) or []] == [[5.0, 6.0], [7.0, 8.0]]
    assert captures.others(step, SampleInput(leaf(5.0), args=(leaf(7.0),))) is None
    assert captures.others(step, SampleInput(leaf(5.0, 6.0))) is None


def test_other_values_of_the_host_stand_beside_those_of_a_device() -> None:
    length, far = torch.tensor(2), torch.empty(3, device="meta")
    assert captures.others_on_host([length], -1) is None
    assert captures.others_on_host([far], -1) is None
    assert captures.others_on_host([far, torch.tensor(True)], -1) is None
    x, lower = captures.others_on_host([far, length], -1) or ()
    assert x is far and (lower.item(), length.item()) == (1, 2)


def run_sample(monkeypatch: pytest.MonkeyPatch, graph: Any, bare: Any, function: Any) -> dict[str, Any]:
    """A sample as on a GPU, with these in the places of the captures of the graph and of the bare op."""
    monkeypatch.setattr(captures, "capture_cuda", bare)
    monkeypatch.setattr(captures, "capture_graph", lambda gm, statics, device: graph(gm, statics))
    sample, fresh = (SampleInput(torch.full((2, 2), value)) for value in (1.0, 2.0))
    return captures.run_sample(function, sample, fresh, "cuda", lambda stage: None)


def untried(*_: Any) -> captures.Captured:
    raise AssertionError("nothing may be captured here")


def test_the_graph_of_what_is_allowed_is_captured_before_the_bare_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    row = run_sample(monkeypatch, faithful, broken, double)
    assert (row["graph"], row["relation"]) == (CAPTURES, AGREE)
    assert row["raw"].startswith(f"{FAILS}: RuntimeError")
    row = run_sample(monkeypatch, broken, untried, double)
    assert row["graph"].startswith(f"{FAILS}: RuntimeError") and row["relation"] == LAXER
    assert row["raw"] == f"{FAILS}: not tried after its graph"
    row = run_sample(monkeypatch, frozen, faithful, double)
    assert row["graph"].startswith(f"{WRONG}: on other values") and (row["raw"], row["relation"]) == (CAPTURES, LAXER)


def test_the_graph_of_what_is_refused_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run_sample(monkeypatch, untried, broken, torch.nonzero)
    assert (row["ids"], row["graph"], row["relation"]) == (["data-dependent-shape"], "", AGREE)


# -- verdicts and relations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 2, []),
        (lambda x: torch.nonzero(x), ["data-dependent-shape"]),
        (lambda x: x * float(x.sum()), ["host-sync"]),
        (lambda x: x.to_sparse(), ["unsupported-layout"]),
    ],
    ids=["allowed", "shape", "host", "layout"],
)
def test_the_verdict_is_that_of_the_rules(function: Any, expected: list[str]) -> None:
    def call(x: torch.Tensor) -> Any:
        return function(x)

    judged = captures.judge(step_of(call, torch.ones(2, 2)), call)
    assert judged.ids == expected
    assert bool(judged.observed) == bool(expected)


@pytest.mark.parametrize(
    ("said", "ids", "expected"),
    [
        (CAPTURES, [], AGREE),
        (CAPTURES, ["host-sync"], STRICTER),
        (f"{WRONG}: x", [], LAXER),
        (f"{FAILS}: x", [], LAXER),
        (f"{WRONG}: x", ["host-sync"], AGREE),
        (f"{captures.SKIPPED}: x", [], captures.SKIPPED),
    ],
)
def test_relations(said: str, ids: list[str], expected: str) -> None:
    assert captures.relation(said, ids) == expected


@pytest.mark.parametrize(
    ("said", "graph", "expected"),
    [
        (f"{FAILS}: x", CAPTURES, AGREE),
        (f"{WRONG}: x", CAPTURES, AGREE),
        (CAPTURES, f"{WRONG}: x", LAXER),
        (f"{FAILS}: x", f"{FAILS}: x", LAXER),
    ],
)
def test_what_is_allowed_is_the_graph(said: str, graph: str, expected: str) -> None:
    assert captures.relation(said, [], graph) == expected


# -- the table --------------------------------------------------------------------------------------------------------


def row(op: str, raw: str, ids: list[str], **more: Any) -> dict[str, Any]:
    sample = {"sample": 0, "raw": raw, "ids": ids, "relation": captures.relation(raw, ids), **more}
    return {"op": op, "dtype": "float32", "samples": [sample], "outcome": sample["relation"]}


def test_a_difference_needs_a_reason_for_every_rule_and_laxity_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures_table, "RULES", {"a-rule": "as a whole"})
    monkeypatch.setattr(captures_table, "OPS", {("op", "b-rule"): "here", ("lax", LAXER): "known"})
    said = captures_table.reason
    assert said("any", ["a-rule"], STRICTER, "cuda (x)") == "as a whole"
    assert said("op", ["a-rule", "b-rule"], STRICTER, "cuda (x)") == "as a whole; here"
    assert said("any", ["a-rule", "b-rule"], STRICTER, "cuda (x)") is None
    assert said("any", ["b-rule"], STRICTER, "cpu (x)") == captures_table.CPU
    assert said("lax", [], LAXER, "cuda (x)") == "known"
    assert said("lax", [], LAXER, "cpu (x)") == "known"
    assert said("other", [], LAXER, "cpu (x)") is None


def test_what_has_no_reason_is_listed() -> None:
    rows = [
        row("fine", CAPTURES, []),
        row("lax", f"{FAILS}: no", []),
        row("strict", CAPTURES, ["host-sync"]),
        row("known", CAPTURES, [], unsafe="aten.known.default"),
        {"op": "gone", "dtype": "float32", "samples": [], "outcome": "crash", "reasons": {"died": 1}},
        {"op": "absent", "dtype": "float32", "samples": [], "outcome": "skipped"},
    ]
    assert captures_table.unjustified(rows, "cuda") == [
        "no result: gone: died",
        "allowed, but torch would not capture aten.known.default: known",
        "laxer: lax: fails: no; allowed",
        "stricter: strict: captures; host-sync",
    ]


def test_a_bare_op_that_is_not_captured_is_listed_with_its_reason() -> None:
    known, unknown = (f"{FAILS}: {text}" for text in (next(iter(captures_table.BARE)), "something else"))
    rows = [row("moved", known, [], graph=CAPTURES), row("odd", unknown, [], graph=CAPTURES)]
    for one in rows:
        one["samples"][0]["relation"] = one["outcome"] = AGREE
    assert captures_table.why_bare(rows[0]["samples"][0]) == next(iter(captures_table.BARE.values()))
    assert captures_table.unjustified(rows, "cuda") == [f"only its graph captures: odd: {unknown}"]


def test_the_page_counts_the_graph_and_lists_the_bare_op(tmp_path: Path) -> None:
    message = f"{FAILS}: {next(iter(captures_table.BARE))} during a capture"
    moved = {**row("moved", message, [], graph=CAPTURES), "case": "moved", "outcome": AGREE, "date": "", "revision": ""}
    moved["samples"][0]["relation"] = AGREE
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in ({"case": "environment", "device": "cuda (x)"}, moved)))
    lines = captures_table.page(path).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["captures", "1", "0"] in cells and ["fails", "0", "0"] in cells
    below = cells[lines.index("## Allowed: the bare op is not captured, its graph is") :]
    assert ["moved", "float32", "0", message, next(iter(captures_table.BARE.values()))] in below


def test_a_graph_that_fails_is_what_is_told() -> None:
    rows = [row("hole", f"{FAILS}: not tried after its graph", [], graph=f"{FAILS}: no")]
    assert captures_table.unjustified(rows, "cuda") == ["laxer: hole: its graph fails: no; allowed"]


@pytest.mark.parametrize(("verdict", "relation"), [("host-sync, collective", AGREE), ("allowed", LAXER)])
def test_a_process_that_dies_in_a_capture_is_a_failed_capture(verdict: str, relation: str) -> None:
    said = f"the process died, exit code -11, at: sample 1: capture; verdict: {verdict}"
    whole = captures_table.complete({"op": "x", "outcome": "crash", "reasons": {said: 1}})
    (sample,) = whole["samples"]
    assert sample["raw"] == "fails: the process died, exit code -11"
    assert (sample["sample"], sample["relation"], whole["outcome"]) == (1, relation, relation)


# -- processes and the command ----------------------------------------------------------------------------------------


def sweep(device: str, folder: Path, *names: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    results, page = folder / "rows.jsonl", folder / "page.md"
    arguments = ["captures", "--device", device, "--only", *names, "--results", str(results), "--out", str(page)]
    status = command_line.main(arguments)
    return status, {r["op"]: r for r in captures_table.read(results)[1]}, page.read_text()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command tells its processes is forgotten afterwards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def test_the_command_lists_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows, page = sweep("cpu", tmp_path, "mul", "nonzero")
    assert status == 0, capsys.readouterr().out
    assert (rows["mul"]["outcome"], rows["nonzero"]["outcome"]) == (AGREE, STRICTER)
    assert all(sample["backward"] for sample in rows["mul"]["samples"])
    assert "data-dependent-shape" in page and captures_table.CPU in page
    assert "2 ops, 0 differences without a reason" in capsys.readouterr().out


def test_rows_of_other_ops_are_kept_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep("cpu", tmp_path, "mul", "nonzero")
    command = ["captures", "--only", "mul", "--update", "--results", str(tmp_path / "rows.jsonl")]
    assert command_line.main(command) == 0
    assert "2 ops, 0 differences without a reason" in capsys.readouterr().out
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4  # the environment, three rows, the last of mul


@pytest.mark.cuda
def test_on_a_gpu_a_failed_capture_ends_its_process_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows, _ = sweep("cuda", tmp_path, "nonzero", "bernoulli", "mul")
    assert status == 0
    assert "import everything themselves" not in capsys.readouterr().err  # the forks' parent has left CUDA alone
    assert rows["nonzero"]["samples"][0]["raw"].startswith(FAILS) and rows["nonzero"]["retire"]
    assert [rows[name]["samples"][0]["raw"] for name in ("bernoulli", "mul")] == [CAPTURES] * 2


def matrices(*shape: int) -> Any:
    """Of these sizes, well conditioned."""
    return lambda device, seed: (seed * 0.1 + torch.eye(*shape[-2:], device=device).expand(shape),)


def whole(*sizes: int) -> Any:
    """A vector of whole numbers for each of these lengths."""
    return lambda device, seed: tuple(torch.arange(size, device=device) * seed for size in sizes)


def segments(device: str, seed: int) -> tuple[torch.Tensor, ...]:
    return torch.full((5,), float(seed), device=device), torch.tensor([2, 3], device=device)


BORDERS: dict[str, tuple[Any, Any, bool]] = {
    "lu, one": (lambda x: torch.linalg.lu_factor_ex(x), matrices(600, 600), True),
    "lu, one in a batch": (lambda x: torch.linalg.lu_factor_ex(x), matrices(1, 17, 17), True),
    "lu, many of 16": (lambda x: torch.linalg.lu_factor_ex(x), matrices(500, 16, 16), True),
    "lu, 16 of 128": (lambda x: torch.linalg.lu_factor_ex(x), matrices(16, 128, 128), True),
    "lu, 17 of 17": (lambda x: torch.linalg.lu_factor_ex(x), matrices(17, 17, 17), False),
    "lu, two of 129": (lambda x: torch.linalg.lu_factor_ex(x), matrices(2, 129, 129), False),
    "lu, wide": (lambda x: torch.linalg.lu_factor_ex(x), matrices(2, 3), False),
    "det": (lambda x: torch.linalg.det(x), matrices(17, 17, 17), False),
    "slogdet": (lambda x: torch.linalg.slogdet(x), matrices(17, 17, 17), False),
    "inverse": (lambda x: torch.linalg.inv_ex(x), matrices(17, 17, 17), False),
    "inverse, small": (lambda x: torch.linalg.inv_ex(x), matrices(17, 16, 16), True),
    "inverse, checked": (lambda x: torch.linalg.inv_ex(x, check_errors=True), matrices(5, 5), False),
    "cholesky, batched": (lambda x: torch.linalg.cholesky_ex(x), matrices(4, 5, 5), True),
    "cholesky, checked": (lambda x: torch.linalg.cholesky_ex(x, check_errors=True), matrices(5, 5), False),
    "svd, batched": (lambda x: torch.linalg.svdvals(x), matrices(4, 5, 5), False),
    "svd, large": (lambda x: torch.linalg.svdvals(x), matrices(40, 40), False),
    "svd, empty": (lambda x: torch.linalg.svdvals(x), matrices(3, 0), True),
    "eigh, batched": (lambda x: torch.linalg.eigvalsh(x), matrices(4, 5, 5), False),
    "eigh, larger": (lambda x: torch.linalg.eigvalsh(x), matrices(40, 40), False),
    "eigh, empty": (lambda x: torch.linalg.eigvalsh(x), matrices(0, 5, 5), True),
    "ldl, empty": (lambda x: torch.linalg.ldl_factor_ex(x), matrices(0, 0), True),
    "isin, 9": (lambda x, y: torch.isin(x, y), whole(1, 9), True),
    "isin, 10": (lambda x, y: torch.isin(x, y), whole(1, 10), False),
    "isin, 10 in two": (lambda x, y: torch.isin(x, y), whole(2, 10), True),
    "isin, unique": (lambda x, y: torch.isin(x, y, assume_unique=True), whole(5, 20), False),
    "isin, 9, unique": (lambda x, y: torch.isin(x, y, assume_unique=True), whole(1, 9), True),
    "segments, checked": (lambda x, n: torch.segment_reduce(x, "sum", lengths=n), segments, False),
    "segments": (lambda x, n: torch.segment_reduce(x, "sum", lengths=n, unsafe=True), segments, True),
}
"""What a rule asks of sizes and options, on either side of its border: op, values by device and seed, if allowed."""


def border(name: str, device: str, report: Any = lambda _: None) -> dict[str, Any]:
    """The row of a sample on a border; its process is not used again."""
    function, values, _ = BORDERS[name]
    sample, fresh = (SampleInput(first, args=tuple(rest)) for first, *rest in (values(device, seed) for seed in (1, 2)))
    return {"op": name, "retire": True, **captures.run_sample(function, sample, fresh, device, report)}


def border_on_gpu(case: Case, report: Any) -> dict[str, Any]:
    return border(case.op, "cuda", report)


@pytest.mark.parametrize("name", BORDERS)
def test_the_verdict_on_either_side_of_a_border(name: str) -> None:
    row = border(name, "cpu")
    assert row["raw"] == CAPTURES  # the program itself is right
    assert (not row["ids"]) == BORDERS[name][2]


@pytest.mark.cuda
def test_on_a_gpu_the_borders_lie_where_the_rules_say() -> None:
    prepare = functools.partial(in_worker.prepare_captures, "cuda")
    cases = [Case(name, "") for name in BORDERS]
    rows = workers.run(
        cases, border_on_gpu, prepare, jobs=6, timeout=60, row_of=in_worker.row_of, preload=command_line.PRELOAD
    )
    found = {row["op"]: (row.get("relation"), row.get("graph"), row.get("raw"), row.get("reasons")) for row in rows}
    assert {name: told for name, told in found.items() if told[0] != AGREE} == {}
    assert found.keys() == BORDERS.keys()


def note_process(case: Case, report: Any, *, retire: str) -> dict[str, Any]:
    return {"case": case.key, "op": case.op, "process": os.getpid(), "retire": case.op == retire}


def nothing_to_prepare() -> None:
    """A worker that needs nothing."""


def test_a_row_that_says_so_ends_its_process() -> None:
    cases = [Case(name, "float32") for name in "abc"]
    runner = functools.partial(note_process, retire="b")
    rows = workers.run(
        cases, runner, nothing_to_prepare, jobs=1, timeout=60, row_of=dict, preload=command_line.PRELOAD
    )  # forks of the process that the command above has started
    a, b, c = (row["process"] for row in rows)
    assert a == b != c


def die_once_ready(mark: str) -> None:
    """Every second process, counted in a folder, dies before it is ready; the first one does not."""
    number = len(os.listdir(mark))
    (Path(mark) / f"{number}").touch()
    if number % 2:
        os._exit(3)


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_process_that_does_not_start_is_replaced_if_others_have_started(tmp_path: Path, fails_first: bool) -> None:
    if fails_first:
        (tmp_path / "0").touch()
    cases = [Case(name, "float32") for name in "abc"]
    runner = functools.partial(note_process, retire="b")
    prepare = functools.partial(die_once_ready, str(tmp_path))
    rows = workers.run(cases, runner, prepare, jobs=1, timeout=60, row_of=dict, preload=command_line.PRELOAD)
    if fails_first:
        with pytest.raises(RuntimeError, match="died at its start"):
            list(rows)
        return
    assert [row["op"] for row in rows] == ["a", "b", "c"]
    assert len(os.listdir(tmp_path)) == 3


def test_ops_that_are_not_begun_in_time_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["captures", "--only", "mul", "add", "--minutes", "0", "--results", str(tmp_path / "rows.jsonl")]
    assert command_line.main(command) == 1
    assert "0 ops, 2 more not begun, 0 differences without a reason" in capsys.readouterr().out


def test_a_results_file_is_judged_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = {"sample": 0, "raw": CAPTURES, "ids": ["host-sync"], "relation": STRICTER, "observed": ["reads"]}
    row = {"case": "capture/odd/float32", "op": "odd", "dtype": "float32", "samples": [sample], "outcome": STRICTER}
    rows = [{"case": "environment", "device": "cuda (a GPU)"}, {**row, "date": "today", "revision": ""}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    monkeypatch.setattr(command_line, "HERE", tmp_path)
    assert command_line.main(["tables", "--captures", str(path)]) == 1
    assert "stricter: odd: captures; host-sync" in capsys.readouterr().out
    assert "**unjustified**" in (tmp_path / "captures.md").read_text()
    monkeypatch.setitem(captures_table.OPS, ("odd", "host-sync"), "it is")
    assert command_line.main(["tables", "--captures", str(path)]) == 0
    assert "1 ops, 0 differences without a reason" in capsys.readouterr().out
