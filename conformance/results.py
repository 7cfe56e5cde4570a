"""Rows in a JSON-lines file: appended as they come, read again to go on after an interruption."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

import fxgraph

from .outcomes import Row

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "conformance" / "results"


class OtherRun(Exception):
    """A results file that holds rows of another kind of run."""


def environment(device: str, **settings: Any) -> dict[str, Any]:
    """What rows of one file have in common."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "case": "environment",
        "fxgraph": fxgraph.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({name})",
        **settings,
    }


def revision() -> str:
    """The commit of the checkout, with a plus sign where files differ from it; empty outside of a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain", "fxgraph", "passes"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def read(path: Path) -> Iterator[Row]:
    """The rows of a file, the environment's first; a last line that was cut short by an interruption is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            row: Row = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield row


def latest(path: Path) -> dict[str, Row]:
    """The last row of each case."""
    return {row["case"]: row for row in read(path)}


class Results:
    """A results file that is written to.

    Args:
        path: the file.
        environment: of this run; see :func:`environment`.
        fresh: begin anew.
        again: outcomes whose cases count as unfinished.
    Raises:
        OtherRun: if the file holds rows of another environment.
    """

    def __init__(self, path: Path, environment: dict[str, Any], *, fresh: bool, again: Collection[str] = ()) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        rows = latest(path)
        was = rows.pop("environment", environment)
        changed = {k: (was.get(k), v) for k, v in environment.items() if was.get(k) != v}
        if changed:
            text = ", ".join(f"{name} {old!r}, now {new!r}" for name, (old, new) in changed.items())
            raise OtherRun(
                f"{path} is of another run ({text}): begin anew with --fresh, or name another with --results"
            )
        self.finished = {key for key, row in rows.items() if row["outcome"] not in again}
        self._revision = revision()
        if not path.exists():
            self._write(environment)

    def add(self, row: Row) -> None:
        """Append a row."""
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self._write({**row, "revision": self._revision, "date": date})

    def _write(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
