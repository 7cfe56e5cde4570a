"""Has fxgraph become slower? ``python benchmarks/check.py OLD.json NEW.json`` compares two runs of compare.py.

For every workload and contestant of fxgraph's in both: the ratio to bare where both have it, else the ratio to eager.
Ratios, since times belong to one machine and one day. Exit status 1 if a ratio has grown by more than ``--percent``, or
if what was ``ok`` is not any more or is missing; 2 if the runs cannot be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results import FORMAT
from tabulate import tabulate


class CannotCompare(Exception):
    """The two files do not say the same kind of thing."""


@dataclasses.dataclass(frozen=True)
class Change:
    """What has become of one contestant on one workload.

    Attributes:
        what: ``worse``, ``better`` or ``same``, as far as the limit counts.
        ratio: which ratio was compared, or ``status``.
    """

    workload: str
    contestant: str
    what: str
    ratio: str
    old: str
    new: str
    percent: float | None = None


def load(path: Path) -> dict[str, Any]:
    """A run from its JSON.

    Raises:
        CannotCompare: if it is not a run of this format.
    """
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{path}: {error}") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise CannotCompare(f"{path}: not a result of compare.py in format {FORMAT}")
    return run


def changes(old: Mapping[str, Any], new: Mapping[str, Any], percent: float) -> Iterator[Change]:
    """Compare all contestants of fxgraph's that either run has.

    Raises:
        CannotCompare: for runs on different kinds of device.
    """
    if old["device"] != new["device"]:
        raise CannotCompare(f"one run is on {old['device']}, the other on {new['device']}")
    for workload in dict.fromkeys([*old["workloads"], *new["workloads"]]):
        before = old["workloads"].get(workload, {}).get("contestants", {})
        after = new["workloads"].get(workload, {}).get("contestants", {})
        for name in dict.fromkeys([*before, *after]):
            if name.startswith("fxgraph"):
                yield _change(workload, name, before.get(name), after.get(name), percent)


def _change(workload: str, name: str, old: Any, new: Any, percent: float) -> Change:
    states = [entry["status"] if entry else "missing" for entry in (old, new)]
    if states != ["ok", "ok"]:
        what = "worse" if states[0] == "ok" else "better" if states[1] == "ok" else "same"
        if states[1] in ("wrong", "failed") and states[0] != states[1]:
            what = "worse"  # new here, and not right
        first, second = (_state(entry) for entry in (old, new))
        return Change(workload, name, what, "status", first, second)
    for key in ("ratio_to_bare", "ratio_to_eager"):
        if old[key] and new[key]:
            before, after = old[key]["median"], new[key]["median"]
            grown = (after / before - 1) * 100
            what = "worse" if grown > percent else "better" if grown < -percent else "same"
            return Change(workload, name, what, key.replace("_", " "), f"{before:.3f}", f"{after:.3f}", grown)
    return Change(workload, name, "worse", "no ratio", "ok", "cannot be compared")


def _state(entry: Any) -> str:
    if not entry:
        return "missing"
    return f"{entry['status']}: {entry['message']}" if entry["message"] else str(entry["status"])


def main() -> int:
    """Print what has changed; 0, 1 or 2 as the module says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--percent", type=float, default=10.0, help="how much worse is too much (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        found = list(changes(load(arguments.old), load(arguments.new), arguments.percent))
        if not any(change.old != "missing" for change in found):
            raise CannotCompare("the old run has no contestant of fxgraph's")
    except CannotCompare as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    changed = [change for change in found if change.what != "same"]
    rows = [
        [c.what, c.workload, c.contestant, c.ratio, c.old, c.new, "" if c.percent is None else f"{c.percent:+.1f} %"]
        for c in sorted(changed, key=lambda c: (c.what != "worse", c.workload, c.contestant))
    ]
    if rows:
        print(tabulate(rows, ["", "workload", "contestant", "of", "old", "new", "change"], disable_numparse=True))
    worse = sum(change.what == "worse" for change in changed)
    print(
        f"{worse} worse, {len(changed) - worse} better, {len(found) - len(changed)} the same "
        f"(within {arguments.percent:g} %)"
    )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
