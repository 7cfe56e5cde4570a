"""`passes` needs neither fxgraph nor CUDA: it works, and its own tests pass, in a folder where neither is to be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Quick ones out of the package's own: rules, driver, rewrites. (Fake CUDA tensors, which others use, start CUDA where
# there is one.)
TESTS = ("test_constraint.py", "test_pipeline.py", "test_dead_code.py")

# Fails the moment that anything imports fxgraph or starts CUDA.
GUARD = """
import sys
import torch


class NoFxgraph:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fxgraph":
            raise ImportError(f"{name} is not to be had here")


def refuse():
    raise AssertionError("something started CUDA")


sys.meta_path.insert(0, NoFxgraph())
torch.cuda._lazy_init = refuse


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: not here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``passes``, its tests and the guard, and nothing else of this project."""
    made = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "passes", made / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    for name in TESTS:
        shutil.copy(ROOT / "tests" / name, made)
    (made / "conftest.py").write_text(GUARD)
    return made


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", *arguments] if sys.version_info >= (3, 11) else [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_it_imports_and_rewrites_without_fxgraph_and_without_cuda(folder: Path) -> None:
    (folder / "script.py").write_text(
        GUARD + "sys.path.insert(0, '')\n"
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "import passes\n"
        "gm = make_fx(lambda x: x.exp() + x.exp(), tracing_mode='fake')(torch.ones(2))\n"
        "gm = passes.apply(gm, [passes.MergeCommonSubexpressions(), passes.RemoveDeadCode()])\n"
        "assert passes.check(gm)\n"
        "assert not torch.cuda.is_initialized() and 'fxgraph' not in sys.modules\n"
        "print(len(gm.graph.nodes), passes.__file__)\n"
    )
    count, file = run(folder, "script.py").split()
    # the placeholder, one exp, the addition, the output
    assert (int(count), Path(file).parent) == (4, folder / "passes")


def test_its_own_tests_pass_there(folder: Path) -> None:
    out = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not cuda", "--import-mode=prepend", *TESTS)
    assert " passed" in out
    assert "failed" not in out
