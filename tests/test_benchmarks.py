"""The benchmarks run, their JSON has its form, contestants that fail or are wrong are named, and check.py decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"

pytest.importorskip("tabulate", reason="tabulate is not installed (it is in the extra `benchmarks`)")
pytest.importorskip("tqdm", reason="tqdm is not installed (it is in the extra `benchmarks`)")


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in this checkout, on its packages, with one thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: __import__(name)


# -- compare.py -------------------------------------------------------------------------------------------------------

# Worker processes import this script again, under another name, so they have these contestants too.
WITH_BAD_CONTESTANTS = f"""
import os, signal, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import compare, contestants
from contestants import CONTESTANTS, Contestant, Loop

class Doubled(Loop):
    def checked_step(self, i):
        return [2 * gradient for gradient in super().checked_step(i)]

def raises(task):
    raise ValueError("one line\\nanother line")

def dies(task):
    os.kill(os.getpid(), signal.SIGKILL)

for name, prepare in {{"raises": raises, "dies": dies, "doubled": lambda task: Doubled(task, task.parts)}}.items():
    CONTESTANTS[name] = Contestant(name, name, ("cpu",), prepare)

if __name__ == "__main__":
    sys.exit(compare.main())
"""
KEYS = {
    *("status", "message", "notes", "wall_us", "host_us", "ratio_to_bare", "ratio_to_eager", "setup_s"),
    *("reserved_mib", "peak_mib", "gradient_error", "gradient_bound", "steps_per_round"),
}


def compared(tmp_path: Path, *arguments: str | Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What a short run of two rounds prints, and its JSON."""
    few = ["--cpu", "--quick", "--workloads", "mlp6-narrow", "--rounds", "2", "--seconds", "0.2", "--jobs", "4"]
    done = python(*arguments, *few, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (run["format"], run["device"], run["complete"]) == (1, "cpu", True)
    assert run["machine"]["torch"] == torch.__version__
    assert list(run["workloads"]) == ["mlp6-narrow"]
    found = run["workloads"]["mlp6-narrow"]["contestants"]
    assert all(set(entry) == KEYS for entry in found.values())
    for name, entry in found.items():
        if entry["status"] in ("ok", "wrong"):
            assert len(entry["wall_us"]["rounds"]) == len(entry["ratio_to_eager"]["rounds"]) == 2, name
            assert 0 < entry["wall_us"]["q1"] <= entry["wall_us"]["median"] <= entry["wall_us"]["q3"], name
            assert entry["setup_s"] > 0, name
    return done, found


def test_compare_side_by_side(tmp_path: Path):
    """A process per contestant: figures in the form that results.py states, a table, and a plot if matplotlib is
    there."""
    done, found = compared(tmp_path, BENCHMARKS / "compare.py", "--contestants", "eager,fxgraph,bare")
    assert {name: entry["status"] for name, entry in found.items()} == {
        "eager": "ok",
        "fxgraph": "ok",
        "bare": "not available",
    }
    assert found["eager"]["ratio_to_eager"]["rounds"] == [1, 1]
    # The engine runs eager's kernels in eager's order.
    assert found["fxgraph"]["gradient_error"] == found["eager"]["gradient_error"] < 1e-5
    assert done.stdout == (tmp_path / "out" / "compare.txt").read_text() + "\n"
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert {"mlp6-narrow", "eager", "fxgraph", "bare"} <= set(rows)
    assert "round" not in done.stderr, "a progress bar where there is no terminal"
    if "no plot" not in done.stderr:
        assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / "out" / "compare.svg").read_text()


def test_contestants_that_fail_or_are_wrong(tmp_path: Path):
    """They are named with the reason, and what they do to the process that all share costs the others nothing."""
    script = tmp_path / "with_bad_contestants.py"
    script.write_text(WITH_BAD_CONTESTANTS)
    done, found = compared(tmp_path, script, "--together", "--contestants", "eager,raises,doubled,dies")
    assert {name: entry["status"] for name, entry in found.items()} == {
        "eager": "ok",
        "raises": "failed",
        "doubled": "wrong",
        "dies": "failed",
    }
    assert found["raises"]["message"] == "ValueError: one line"
    assert "SIGKILL" in found["dies"]["message"]
    # Every gradient is twice what it should be: an error of 1 up to float32's rounding.
    assert found["doubled"]["gradient_error"] == pytest.approx(1, abs=1e-5)
    assert "ValueError: one line" in done.stdout
    assert "gradient error 1 " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "mlp7"], "unknown: mlp7; known: mlp6,"),
        (["--contestants", "magic,eager"], "unknown: magic; known: bare,"),
        (["--rounds", "0"], "0 is not more than 0"),
    ],
)
def test_bad_arguments_are_named(module: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    """Exit status 2 and what would be allowed."""
    with pytest.raises(SystemExit) as raised:
        module("compare").parse_arguments(["--cpu", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


# -- figures ----------------------------------------------------------------------------------------------------------


def test_gradient_error(module: Any):
    """Norm of the difference by the tensor's norm, or a thousandth of the largest norm; infinite without a value."""
    error = module("measure").gradient_error
    large, small = torch.tensor([4.0, 3.0]), torch.tensor([1e-9])  # norms 5 and 1e-9
    assert error([large, None], [large.double(), None]) == 0
    assert error([large + torch.tensor([0.0, 1.0])], [large.double()]) == 0.2
    # 1e-9 is as good as zero beside 5: the scale is 5e-3.
    assert error([large, small + 5e-9], [large.double(), small.double()]) == pytest.approx(1e-6, rel=1e-3)
    assert error([None], [large.double()]) == float("inf")
    assert error([large], [None]) == float("inf")
    assert error([torch.tensor([float("nan"), 2.0])], [large.double()]) == float("inf")


@pytest.mark.parametrize(
    ("eager", "bound"),
    [(None, 0.1), (0.0, 1e-5), (1e-3, 1e-2), (0.2, 0.5), (0.4, 0.6)],
)
def test_gradient_bound(module: Any, eager: float | None, bound: float):
    """Ten times eager's error, but at least 1e-5 and at most 0.5 or half more than eager's."""
    results = module("results")
    entry = None if eager is None else results.Entry(gradient_error=eager)
    assert results.gradient_bound(entry) == pytest.approx(bound)


def test_steps_are_whole_cycles(module: Any):
    """Each batch comes equally often in what is timed, and a slow contestant takes as few steps as it can."""
    steps_for = module("compare").steps_for
    assert steps_for(0.1, step_s=0.001, cycle=4) == (4, 48, 8)  # half of 0.1 s is 50 steps: 12 cycles
    assert steps_for(0.001, step_s=0.001, cycle=2) == (2, 4, 8)
    assert steps_for(0.1, step_s=1.0, cycle=4) == (0, 4, 2)


def test_timers_leave_out_what_is_timed_inside(module: Any):
    """Time belongs to the innermost timed function, and a label knows whether a backward runs."""
    timers = module("timers").Timers()
    inner = timers.wrap("{}: inner", lambda: time.sleep(0.02))
    timers.wrap("outer", lambda: (time.sleep(0.01), inner()))()
    timers.wrap("backward", inner)()
    timers.end_step()
    assert timers.calls == {"outer": 1, "backward": 1, "forward: inner": 1, "backward: inner": 1}
    assert timers.median_us("forward: inner") >= 20_000
    # The sleep of 10 ms alone; below the 20 ms of the other one, however long the machine oversleeps within reason.
    assert 9_000 <= timers.median_us("outer") < 20_000


def test_profile_call_finds_all_of_its_names():
    """Every function in its list of parts exists, and guards, signature, copies, replay and node have a row each."""
    done = python(BENCHMARKS / "profile_call.py", "mlp6-narrow", "--device", "cpu", "--steps", "3", "--ops", "3")
    assert done.returncode == 0, done.stderr
    for part in ("guards", "signature: key", "slot search", "copy inputs in", "forward: replay", "backward: replay"):
        assert part in done.stdout
    assert "no such names" not in done.stdout
    assert "aten::" in done.stdout


# -- check.py ---------------------------------------------------------------------------------------------------------


def entry(ratio: float, status: str = "ok", to: str = "bare") -> dict[str, Any]:
    """A contestant's entry with one ratio."""
    found: dict[str, Any] = {"status": status, "message": "", "ratio_to_bare": None, "ratio_to_eager": None}
    return {**found, f"ratio_to_{to}": {"median": ratio}}


def a_run(**contestants: dict[str, Any]) -> dict[str, Any]:
    """A run with one workload."""
    return {"format": 1, "device": "cuda", "workloads": {"mlp6": {"contestants": contestants}}}


@pytest.fixture
def check(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs check.py on two runs; gives the exit status and all that it prints."""

    def run(old: dict[str, Any], new: dict[str, Any], *options: str) -> tuple[int, str]:
        for name, content in (("old.json", old), ("new.json", new)):
            (tmp_path / name).write_text(json.dumps(content))
        command = ["check.py", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options]
        monkeypatch.setattr(sys, "argv", command)
        status = module("check").main()
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


OLD = a_run(eager=entry(8), fxgraph=entry(2), fxgraph_inductor=entry(0, "not available"))


@pytest.mark.parametrize(
    ("new", "status", "words"),
    [
        (OLD, 0, "0 worse, 0 better, 2 the same"),
        (a_run(eager=entry(99), fxgraph=entry(2.19), fxgraph_inductor=entry(0, "not available")), 0, "0 worse"),
        (a_run(fxgraph=entry(2.21), fxgraph_inductor=entry(0, "not available")), 1, "+10.5 %"),
        (a_run(fxgraph=entry(1.5), fxgraph_inductor=entry(1.1)), 0, "0 worse, 2 better"),
        (a_run(fxgraph=entry(1.5, "wrong"), fxgraph_inductor=entry(1)), 1, "1 worse, 1 better"),
        (a_run(fxgraph=entry(1.5), fxgraph_inductor=entry(1, "failed")), 1, "1 worse, 1 better"),
        (a_run(fxgraph_inductor=entry(0, "not available")), 1, "missing"),
        ({**OLD, "workloads": {}}, 1, "missing"),
        ({**OLD, "device": "cpu"}, 2, "one run is on cuda, the other on cpu"),
        ({**OLD, "format": 0}, 2, "not a result of compare.py in format 1"),
    ],
    ids=["same", "peers", "worse", "better", "wrong", "newly failed", "gone", "workload gone", "device", "format"],
)
def test_check(check: Any, new: dict[str, Any], status: int, words: str):
    """1 where a ratio of fxgraph's grew by more than 10 % or a verdict got worse, 2 where the runs do not compare."""
    found, text = check(OLD, new)
    assert found == status, text
    assert words in text


def test_check_uses_the_ratio_to_eager_where_there_is_no_bare_replay(check: Any):
    """As on the CPU, and for what no graph can hold."""
    old, new = a_run(fxgraph=entry(0.5, to="eager")), a_run(fxgraph=entry(0.9, to="eager"))
    status, text = check(old, new)
    assert status == 1
    assert "ratio to eager" in text
    assert "+80.0 %" in text
    assert check(old, new, "--percent", "90")[0] == 0
