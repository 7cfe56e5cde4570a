"""Another project's own tests of graphed callables, run on fxgraph: a checkout is read, nothing of it is kept here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .results import ROOT

SUITES: tuple[tuple[str, tuple[str, ...]], ...] = (
    # PyTorch, in folders from which its test files are meant to be run
    ("test/test_cuda.py", ("-k", "make_graphed_callables")),
    ("test/test_cuda_graphs.py", ("-k", "make_graphed_callables")),
    ("test/dynamo/test_cudagraphs.py", ()),
    ("test/dynamo/test_backends.py", ("-k", "cudagraphs")),
    # TransformerEngine
    ("tests/pytorch/test_cuda_graphs.py", ()),
)
"""Test files by their path in the checkout, and how to pick their tests. Those that a checkout has not are left out."""


def commands(checkout: Path, pytest_args: Sequence[str] = ()) -> list[list[str]]:
    """One pytest command per test file that is there; each file runs in a process of its own."""
    base = [sys.executable, "-m", "pytest", "-p", "conformance.swap", "-p", "no:cacheprovider", "-ra", "-q"]
    return [
        [*base, str(checkout / path), *picked, *pytest_args] for path, picked in SUITES if (checkout / path).exists()
    ]


def run(checkout: Path, pytest_args: Sequence[str] = ()) -> int:
    """Run what the checkout has; gives the exit status."""
    checkout = checkout.resolve()
    todo = commands(checkout, pytest_args)
    if not todo:
        print(f"{checkout} has none of: {', '.join(path for path, _ in SUITES)}", file=sys.stderr)
        return 2
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    status = 0
    for command in todo:
        print("$", " ".join(command), flush=True)
        # From the file's folder, as the projects do: the checkout's own packages must not hide the installed ones.
        done = subprocess.run(command, cwd=Path(command[8]).parent, env={**os.environ, "PYTHONPATH": path})
        status = max(status, done.returncode)
    return status
