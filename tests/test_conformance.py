"""The conformance harness: it says equal where fxgraph is, and names wrong, refused, crashing and hanging entries."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fxgraph

pytest.importorskip("expecttest", reason="torch's own op database needs it")
pytest.importorskip("tabulate")

from conformance import __main__ as command_line
from conformance import compare, entries, models, ops, results, tables, trial, upstream, workers
from conformance.outcomes import Outcome, refusal

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- entries that do what they should not -----------------------------------------------------------------------------


def wrong_values(target, args, kwargs):
    """One part in a million off."""
    return lambda *a, **k: target(*a, **k) * (1 + 1e-6)


def wrong_strides(target, args, kwargs):
    return lambda *a, **k: target(*a, **k).t().contiguous().t()


def forgets_gradients(target, args, kwargs):
    return lambda *a, **k: target(*a, **k) * 1 if not torch.is_grad_enabled() else _no_grad(target, a, k)


def _no_grad(target, args, kwargs):
    first, *rest = args
    return target(first * 1.0, *[r.detach() if isinstance(r, torch.Tensor) else r for r in rest], **kwargs)


def overwrites(target, args, kwargs):
    """What torch.cuda.make_graphed_callables does: the next call's result lands in the last one's memory."""
    kept = []

    def call(*a, **k):
        result = target(*a, **k)
        if kept:
            with torch.no_grad():
                kept[0].data.copy_(result)
        kept[:] = [result]
        return result

    return call


def draws_random_numbers(target, args, kwargs):
    def call(*a, **k):
        torch.rand(1)
        return target(*a, **k)

    return call


def refuses(target, args, kwargs):
    try:
        raise fxgraph.CaptureError("capture-failed", "no", observed="nothing")
    except fxgraph.FxgraphError as error:
        raise RuntimeError("wrapped by somebody else") from error


def crashes(target, args, kwargs):
    raise IndexError("list index out of range")


def says_nothing(target, args, kwargs):
    return target


def dies(target, args, kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(target, args, kwargs):
    time.sleep(600)


PLANTED = [
    (wrong_values, Outcome.WRONG, "call 1: outputs: values"),
    (wrong_strides, Outcome.WRONG, "strides"),
    (forgets_gradients, Outcome.WRONG, "gradients"),
    (overwrites, Outcome.WRONG, "call 1, looked at after call 2"),
    (draws_random_numbers, Outcome.WRONG, "random_state"),
    (refuses, Outcome.REFUSED, "[capture-failed] no: nothing"),
    (crashes, Outcome.CRASH, "IndexError: list index out of range"),
    (says_nothing, Outcome.UNSTATED, "0 replays for 2 calls"),
]


def two_calls() -> list[trial.Call]:
    generator = torch.Generator().manual_seed(0)

    def made() -> torch.Tensor:
        return torch.randn(3, 4, generator=generator).requires_grad_()

    return [trial.Call((made(), made()), {}, seed) for seed in (1, 2)]


@pytest.mark.parametrize("name", list(entries.ENTRIES))
def test_a_function_that_is_captured_is_equal(name):
    result = trial.compare_with_eager(lambda a, b: a * b + a, two_calls(), entries.resolve(name), "cpu")
    assert (result.outcome, result.detail) == (Outcome.EQUAL, "")


@pytest.mark.parametrize("entry, outcome, detail", PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_named(entry, outcome, detail):
    result = trial.compare_with_eager(lambda a, b: a * b + a, two_calls(), entry, "cpu")
    assert result.outcome is outcome, result
    assert detail in result.detail


@pytest.mark.parametrize("name", list(entries.ENTRIES))
def test_what_runs_eagerly_gives_its_reason(name):
    result = trial.compare_with_eager(lambda a, b: (a * b)[a > 0].sum(), two_calls(), entries.resolve(name), "cpu")
    assert result.outcome is Outcome.EAGER
    assert result.detail


def test_a_sample_on_which_eager_raises_is_skipped():
    result = trial.compare_with_eager(lambda a, b: a @ b, two_calls(), crashes, "cpu")
    assert result.outcome is Outcome.SKIPPED


def test_a_function_that_eager_does_not_repeat_is_compared_with_a_tolerance():
    """Here every other result is off by the last bit, as by atomics on CUDA."""
    turn = iter(range(100))

    def unstable(a, b):
        return (a * b).sum() * (1 + next(turn) // 2 * 2**-23)  # the same for the two calls, not for their repetition

    result = trial.compare_with_eager(unstable, two_calls(), says_nothing, "cpu")
    assert any("not repeatable" in note for note in result.notes)
    assert result.outcome is Outcome.UNSTATED  # that is: not wrong


@pytest.mark.parametrize("rarely", [True, False])
def test_before_a_difference_is_called_one_eager_runs_more_often(rarely):
    """Here eager is off by the last bit in every seventh run, which running it twice does not show; or never is."""
    turn = iter(range(1, 1000))

    def unstable(a, b):
        return (a * b).sum() * (1 + 2**-23 if rarely and next(turn) % 7 == 0 else 1)

    def other_order(target, args, kwargs):
        return lambda a, b: (a * b).sum() * (1 + 2**-23)

    result = trial.compare_with_eager(unstable, two_calls(), other_order, "cpu")
    assert result.outcome is (Outcome.UNSTATED if rarely else Outcome.WRONG)  # unstated, that is: not wrong
    assert any("not repeatable" in note for note in result.notes) is rarely


def test_where_eager_repeats_nothing_shapes_are_compared():
    def noise(a, b):
        return torch.rand(3, generator=generator) + a[0, 0]

    generator = torch.Generator()
    result = trial.compare_with_eager(noise, two_calls(), says_nothing, "cpu")
    assert result.outcome is Outcome.UNSTATED
    assert any("values are not compared" in note for note in result.notes)


def test_the_refusal_is_found_inside_of_dynamos_exception():
    torch.compiler.reset()
    with pytest.raises(Exception) as caught:  # whatever Dynamo makes of it
        torch.compile(lambda x: x + 1, backend="graphed", options={"engine": "none"})(torch.ones(2))
    found = refusal(caught.value)
    assert found is not None
    assert found.id == "bad-option"


# -- comparing --------------------------------------------------------------------------------------------------------


def test_copies_keep_strides_shared_memory_and_identity():
    base = torch.randn(4, 6)
    tree = {"view": base[:, ::2], "row": base[0], "wide": torch.ones(1, 3).expand(5, 3), "same": [base, base], "n": 3}
    copy = compare.copy_of(tree)
    assert compare.difference(copy, tree, "", compare.Strictness.BITS) is None
    assert copy["view"].stride() == tree["view"].stride()
    assert copy["wide"].stride() == (0, 1)
    assert copy["same"][0] is copy["same"][1]
    copy["row"].fill_(7.0)
    assert (copy["view"][0] == 7.0).all()
    assert not (tree["view"][0] == 7.0).any()


@pytest.mark.parametrize(
    "one, other, bits, equal",
    [
        ([0.0], [-0.0], False, True),
        ([float("nan")], [float("nan")], True, True),
        ([float("nan")], [1.0], False, False),
        ([1.0, 2.0], [1.0, 2.0], True, True),
        ([1.0], [1.0 + 2**-23], False, False),
    ],
)
def test_bits_and_equal_differ_in_signs_of_zeros_only(one, other, bits, equal):
    a, b = torch.tensor(one), torch.tensor(other)
    for kind in (torch.float32, torch.complex64):
        found = [
            compare.difference(a.to(kind), b.to(kind), "", strictness) is None
            for strictness in (compare.Strictness.BITS, compare.Strictness.EQUAL)
        ]
        assert found == [bits, equal]


# -- ops, models, processes, files ------------------------------------------------------------------------------------


OPS = ["mul", "sort", "nn_functional_dropout"]
DYNAMO_FAILS = "baddbmm"  # in place, on an expanded tensor
PLANT = "test_conformance:wrong_values"


@pytest.fixture(scope="module")
def run_of_the_command(tmp_path_factory):
    """Rows, the table and the last line of one run. In a process of its own: the database's import changes torch."""
    folder = tmp_path_factory.mktemp("conformance")
    path, table = folder / "rows.jsonl", folder / "ops.md"
    command = [
        sys.executable,
        "-m",
        "conformance",
        "ops",
        "--only",
        *OPS,
        DYNAMO_FAILS,
        "--samples",
        "1",
        "--timeout",
        "60",
    ]
    command += ["--variants", "function", "inplace", "mutate", "--entries", *entries.ENTRIES, PLANT]
    command += ["--results", str(path), "--table", str(table)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    return {row["case"]: row for row in results.read(path)}, table.read_text(), done.stdout.splitlines()[-1]


@pytest.mark.parametrize("entry", list(entries.ENTRIES))
@pytest.mark.parametrize("op", OPS)
def test_ops_are_equal(run_of_the_command, op, entry):
    row = run_of_the_command[0][f"op/{op}/float32/function/{entry}"]
    assert row["outcome"] == "equal", row
    assert row["counts"]["equal"] >= 3  # a sample of the database's, and those made of it


@pytest.mark.parametrize("variant", ["inplace", "mutate"])
def test_in_place_forms_are_equal(run_of_the_command, variant):
    for entry in entries.ENTRIES:
        row = run_of_the_command[0][f"op/mul/float32/{variant}/{entry}"]
        assert row["outcome"] == "equal", row


def test_a_failing_op_is_tried_on_the_control_too(run_of_the_command):
    row = run_of_the_command[0][f"op/mul/float32/function/{PLANT}"]
    assert row["outcome"] == "wrong"
    assert row["details"][0]["control"] == "aot_eager: equal"


def test_what_fails_in_dynamo_with_every_backend_is_refused(run_of_the_command):
    row = run_of_the_command[0][f"op/{DYNAMO_FAILS}/float32/mutate/compile"]
    assert row["outcome"] == "refused", row
    assert [reason.partition(":")[0] for reason in row["reasons"]] == ["torch.compile, whatever the backend"]
    row = run_of_the_command[0][f"op/{DYNAMO_FAILS}/float32/mutate/make_graphed_callables"]
    assert row["outcome"] == "eager", row


def test_the_command_sums_up(run_of_the_command):
    rows, table, last = run_of_the_command
    planted = [row for row in rows.values() if row.get("entry") == PLANT]
    assert last == f"{len(rows) - 1 - len(planted)} passed, {len(planted)} failed"
    assert "## Counts" in table
    assert "## wrong" in table
    assert "largest difference" in table
    assert torch.__version__ in table


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_trains_equal_to_eager(precision):
    row = models.run(models.Case("resnet", precision, "fused", "make_graphed_callables"), "cpu", 0)
    assert (row["outcome"], row["replays"]) == ("equal", 3), row


def test_a_model_that_is_not_equal_says_where():
    row = models.run(models.Case("tcn", "fp32", "foreach", "planted"), "cpu", 0, entry=wrong_values)
    assert row["outcome"] == "wrong"
    assert any(reason.startswith("outputs of step 1") for reason in row["reasons"])


class Asks(torch.nn.Module):
    """Another order of operations where it is told that it is compiled."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.1, 3.3, 8))

    def forward(self, x):
        return x * 0.7 * self.scale if torch.compiler.is_compiling() else x * (0.7 * self.scale)


class OutputFeedsOutput(torch.nn.Module):
    """Two parts, as the first output feeds the second; each part uses the weight twice."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        first = (x @ self.w).tanh() @ self.w
        return first, (first @ self.w).tanh() @ self.w


def planted(monkeypatch, build):
    spec = models.Spec("planted", build, lambda: ((torch.randn(4, 8 if build is Asks else 16),), {}))
    monkeypatch.setitem(models.ZOO, "planted", spec)


def test_a_model_that_asks_whether_it_is_compiled_is_compared_with_eager_that_is_told_so(monkeypatch):
    planted(monkeypatch, Asks)
    was = torch.compiler.is_compiling
    row = models.run(models.Case("planted", "fp32", "foreach", "make_graphed_callables"), "cpu", 0)
    assert (row["outcome"], row["replays"]) == ("equal", 3), row
    assert any("is_compiling() is true" in note for note in row["notes"])
    assert torch.compiler.is_compiling is was and not torch.compiler.is_compiling()


def test_parts_whose_gradients_come_in_another_order_are_compared_with_what_a_last_bit_makes(monkeypatch):
    planted(monkeypatch, OutputFeedsOutput)
    case = models.Case("planted", "fp32", "foreach", "make_graphed_callables")
    row = models.run(case, "cpu", 0)
    assert (row["outcome"], row["captures"], row["replays"]) == ("equal", 2, 6), row
    assert any("another order" in note for note in row["notes"])

    def a_gradient_is_lost(target, args, kwargs):
        graphed = entries.make_graphed_callables(target, args, kwargs)
        return lambda x: (lambda first, second: (first.detach(), second))(*graphed(x))

    row = models.run(case, "cpu", 0, entry=a_gradient_is_lost)
    assert row["outcome"] == "wrong", row


def test_the_table_of_models_has_the_rows_of_each_device_and_shard(tmp_path):
    def rows(name, device, model):
        file = results.Results(tmp_path / name, {"case": "environment", "device": device, "torch": "x"}, fresh=True)
        case = models.Case(model, "fp32", "fused", "compile")
        file.add({"case": case.key, **dataclasses.asdict(case), "outcome": "equal", "captures": 1, "replays": 3})
        return tmp_path / name

    files = [rows("a", "cpu (x86)", "vit"), rows("b", "cuda (H)", "vit"), rows("c", "cuda (H)", "swin")]
    lines = tables.models(files).splitlines()
    assert [line.split()[1:4:2] for line in lines if line.startswith(("| vit ", "| swin "))] == [
        ["swin", "cuda"],
        ["vit", "cpu"],
        ["vit", "cuda"],
    ]
    assert any("cpu (x86)" in line and "cuda (H)" in line for line in lines if line.startswith("| device"))
    other = rows("d", "cpu (x86)", "gpt2")
    other.write_text(other.read_text().replace('"torch": "x"', '"torch": "y"'))
    with pytest.raises(results.OtherRun, match="another run on cpu"):
        tables.models([files[0], other])


def nothing() -> None:
    """Workers need no preparation here."""


def run_planted(case, report):
    report("graphed")
    result = trial.compare_with_eager(torch.mul, two_calls(), entries.resolve(case.entry), "cpu")
    return {"case": case.key, "entry": case.entry, "outcome": result.outcome.value}


def row_of(case):
    return {"case": case.key, "entry": case.entry}


def test_death_and_hang_of_a_process_cost_one_case_each():
    here = "test_conformance"
    chosen = ["make_graphed_callables", f"{here}:dies", f"{here}:hangs", f"{here}:crashes", "compile"]
    cases = [ops.Case("neg", "float32", "function", entry) for entry in chosen]
    rows = workers.run(cases, run_planted, nothing, jobs=2, timeout=15, row_of=row_of)
    outcomes = {row["entry"].rpartition(":")[2]: row["outcome"] for row in rows}
    assert outcomes == {
        "make_graphed_callables": "equal",
        "dies": "crash",
        "hangs": "timeout",
        "crashes": "crash",
        "compile": "equal",
    }


def test_a_results_file_is_gone_on_with(tmp_path):
    path = tmp_path / "rows.jsonl"
    environment = {"case": "environment", "torch": "x", "device": "cpu"}
    first = results.Results(path, environment, fresh=False)
    first.add({"case": "a", "outcome": "equal"})
    first.add({"case": "b", "outcome": "wrong"})
    with path.open("a") as file:
        file.write('{"case": "c", "outco')  # an interruption
    assert results.Results(path, environment, fresh=False).finished == {"a", "b"}
    assert results.Results(path, environment, fresh=False, again=["wrong"]).finished == {"a"}
    with pytest.raises(results.OtherRun, match="torch 'x', now 'y'"):
        results.Results(path, {**environment, "torch": "y"}, fresh=False)
    assert results.Results(path, {**environment, "torch": "y"}, fresh=True).finished == set()


def test_shards_are_disjoint_and_together_everything():
    cases = list(range(10))
    shards = [command_line._shard(f"{i}/3") for i in range(3)]
    assert sorted(case for i, n in shards for case in cases[i::n]) == cases
    assert command_line._shard("today/7")[0] in range(7)


def test_another_projects_tests_run_with_our_names(tmp_path):
    folder = tmp_path / "test" / "dynamo"
    folder.mkdir(parents=True)
    (folder / "test_cudagraphs.py").write_text(
        "import fxgraph, torch\n"
        "def test_names():\n"
        "    assert torch.cuda.make_graphed_callables is fxgraph.make_graphed_callables\n"
        "    x = torch.ones(3)\n"
        "    before = fxgraph.stats().replays\n"
        "    assert torch.equal(torch.compile(torch.neg, backend='cudagraphs')(x), -x)\n"
        "    assert fxgraph.stats().replays == before + 1\n"
    )
    (command,) = upstream.commands(tmp_path)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, status, said",
    [
        ("def test_with_amp_cache_enabled_allow_unused_input(): assert False", 0, "fxgraph passes it"),
        ("from torch import a_name_that_was\ndef test(): pass", 0, "of another version"),
        ("def test_other(): assert False", 1, "no reason is known"),
        (
            "def test_with_amp_cache_enabled_allow_unused_input(): assert False\ndef test(): 1 / 0",
            1,
            "no reason is known",
        ),
    ],
)
def test_a_failure_of_another_projects_test_has_a_reason_or_fails_the_run(tmp_path, text, status, said):
    folder = tmp_path / "test" / "dynamo"
    folder.mkdir(parents=True)
    (folder / "test_cudagraphs.py").write_text(text)
    (command,) = upstream.commands(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr


def test_the_database_is_found_among_things_that_are_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cython.parallel", object())
    assert "add" in ops.database.__wrapped__()
