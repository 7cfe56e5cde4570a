"""The example trains, its three ways agree, and it notices when they do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_digits.py"
WAYS = ["eager", "make_graphed_callables", "torch.compile"]

pytest.importorskip("sklearn", reason="scikit-learn is not installed (it is in the extra `examples`)")
pytest.importorskip("tabulate", reason="tabulate is not installed (it is in the extra `examples`)")
pytest.importorskip("tqdm", reason="tqdm is not installed (it is in the extra `examples`)")


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in this checkout, on its packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


def rows(output: str) -> dict[str, list[str]]:
    """Way -> the cells of its row's first line; cells are two or more blanks apart."""
    table = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    return {cells[0]: cells[1:] for cells in table if cells[0] in WAYS}


def test_three_ways_agree(device: str):
    """Exit status 0, one row per way, the same loss and accuracy in each, and graphs that were really replayed."""
    done = python(EXAMPLE, "--epochs", "2", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(done.stdout)
    assert list(table) == WAYS, done.stdout
    eager, *others = table.values()
    tolerance = 0.0 if device == "cpu" else 1e-3
    for cells in others:
        assert float(cells[0]) == pytest.approx(float(eager[0]), abs=tolerance)
        assert float(cells[1]) == pytest.approx(float(eager[1]), abs=0.01 if tolerance else 0.0)
    assert "agree" in done.stdout
    # 2 epochs of 23 training batches each; the table's last two columns are replays and eager calls.
    for way, cells in list(table.items())[1:]:
        assert int(cells[-2]) >= 46, f"{way} replayed too little:\n{done.stdout}"
    assert "100%" in done.stderr, "no progress bar"


def test_disagreement_is_noticed(tmp_path: Path):
    """A way that learns something else makes the example fail and say which way, what, and by how much."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import runpy, sys, torch, fxgraph\n"
        "def wrong(net, sample):\n"
        "    return lambda x: net(x) * 1.001\n"
        "fxgraph.make_graphed_callables = wrong\n"
        "real = fxgraph.stats\n"
        "fxgraph.stats = lambda *of: real()\n"
        f"sys.argv = ['train_digits.py', '--epochs', '1', '--device', 'cpu']\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    done = python(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DISAGREE" in done.stderr
    assert re.search(r"make_graphed_callables: training loss of epoch 1 is \d+\.\d+, eager's \d+\.\d+", done.stderr)
    assert "torch.compile: training loss" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--batch-size", "4", "--device", "abacus"], "invalid choice: 'abacus'"),
        (["--batch-size", "359"], "last batch of one image"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str):
    """Exit status other than 0 and one line that says what is wrong."""
    done = python(EXAMPLE, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
