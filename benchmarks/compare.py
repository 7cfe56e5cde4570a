"""Compare fxgraph with eager, torch's own ways to use CUDA graphs, and a bare replay: one command, side by side.

For each workload every contestant gets a process of its own (``--together``: all share one); the rounds of the
contestants alternate. benchmarks/README.md has the method. Writes compare.json, compare.txt, compare.png and
compare.svg; the JSON after each workload, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
from contestants import CONTESTANTS
from processes import NO_ANSWER, WorkerProcess
from results import FORMAT, Entry, workload_as_json
from tqdm import tqdm
from workloads import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
SETUP_LIMIT_S, ROUND_LIMIT_S = 100.0, 60.0
SLOW_CYCLE_S = 0.5  # a contestant that takes so long for all batches gets no steps that are not needed
LEAST_ROUNDS = 3  # below that a quartile says nothing
LEAST_STEPS = 3


class Team:
    """Contestants that share a process. One that takes the process down is left out of the next process."""

    def __init__(self, names: Sequence[str], workload: str, arguments: argparse.Namespace, scratch: Path) -> None:
        self.names = list(names)
        self._workload, self._arguments, self._scratch = workload, arguments, scratch
        self._starts = 0
        self._process = self._start()

    def _start(self) -> WorkerProcess:
        self._starts += 1
        label = self.names[0] if len(self.names) == 1 else "together"
        log = self._arguments.out / "logs" / f"{self._workload}.{label}.log"
        cache = self._scratch / f"{self._workload}.{label}.{self._starts}"
        cache.mkdir()
        return WorkerProcess(self._workload, self._arguments.device, log, cache)

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the process has started; gives facts on the machine."""
        reply = self._process.reply(timeout_s)
        return reply if "error" in reply else self._process.ask("machine", timeout_s=timeout_s)

    def set_up(self, entries: dict[str, Entry], timeout_s: float) -> None:
        """Set up all contestants that have not failed."""
        end = time.monotonic() + timeout_s
        waiting = self._left(entries)
        while waiting:
            name = waiting.pop(0)
            reply = self._process.ask("set_up", name, timeout_s=end - time.monotonic())
            if "error" in reply:
                entries[name].fail(reply["error"])
                if "lost" in reply and self._restart(entries):
                    waiting = self._left(entries)
            elif "not available" in reply:
                entries[name].status, entries[name].message = "not available", reply["not available"]
            else:
                entries[name].status, entries[name].set_up = "ok", reply
                entries[name].gradient_error = reply["gradient_error"]

    def ask(self, entries: dict[str, Entry], command: str, name: str, *arguments: Any) -> dict[str, Any] | None:
        """A reply, or None where the contestant has failed."""
        reply = self._process.ask(command, name, *arguments, timeout_s=ROUND_LIMIT_S)
        if "error" not in reply:
            return reply
        entries[name].fail(reply["error"])
        if "lost" in reply and self._restart(entries):
            self.set_up(entries, SETUP_LIMIT_S)
        return None

    def _left(self, entries: dict[str, Entry]) -> list[str]:
        return [name for name in self.names if entries[name].status not in ("failed", "not available")]

    def _restart(self, entries: dict[str, Entry]) -> bool:
        if not self._left(entries):
            return False
        self._process.end(grace_s=0)
        self._process = self._start()
        return "error" not in self.ready(SETUP_LIMIT_S)

    def end(self) -> None:
        """End the process."""
        self._process.end()


class Comparison:
    """One run: what is asked for, what has been found, and how much time is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._end = time.monotonic() + arguments.limit
        self._random = random.Random(0)
        self._skipped = False
        self._not_available: dict[str, str] = {}
        self.run: dict[str, Any] = {
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": arguments.commit or commit(),
            "device": arguments.device,
            "machine": {},
            "settings": {
                "rounds": arguments.rounds,
                "seconds": arguments.seconds,
                "limit_s": arguments.limit,
                "jobs": arguments.jobs,
                "processes": "one per workload" if arguments.together else "one per contestant",
            },
            "complete": False,
            "workloads": {},
        }

    def measure_all(self) -> None:
        """Measure the workloads in turn; what the time limit leaves out is skipped and says so."""
        arguments = self.arguments
        work = len(arguments.workloads) * len(arguments.contestants) * (1 + arguments.rounds)
        with (
            tempfile.TemporaryDirectory(prefix="fxgraph-compare-") as scratch,
            tqdm(total=work, unit="round", disable=None, mininterval=0.5) as progress,
        ):
            for done, name in enumerate(arguments.workloads):
                entries = {contestant: Entry() for contestant in arguments.contestants}
                if time.monotonic() < self._end:
                    self._measure(WORKLOADS[name], entries, Path(scratch), progress)
                else:
                    self._skipped = True
                    for entry in entries.values():
                        entry.message = "time limit"
                self._store(name, entries)
                progress.update((done + 1) * len(entries) * (1 + arguments.rounds) - progress.n)
        self.run["complete"] = not self._skipped
        self.save()

    def _store(self, name: str, entries: dict[str, Entry]) -> None:
        self.run["workloads"][name] = workload_as_json(WORKLOADS[name].description, entries)
        self.save()

    def save(self) -> None:
        """Write the JSON, whole or not at all."""
        path = self.arguments.out / "compare.json"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.run, indent=1) + "\n")
        os.replace(unfinished, path)

    def _measure(self, workload: Workload, entries: dict[str, Entry], scratch: Path, progress: tqdm[Any]) -> None:
        here = []
        for name, entry in entries.items():
            if self.arguments.device not in CONTESTANTS[name].devices:
                entry.status, entry.message = "not available", f"not on {self.arguments.device}"
            elif name in self._not_available:
                entry.status, entry.message = "not available", self._not_available[name]
            else:
                here.append(name)
        groups = [here] if self.arguments.together else [[name] for name in here]
        with self._teams([group for group in groups if group], workload, scratch) as teams:
            progress.set_description(f"{workload.name}, set-up", refresh=True)
            with ThreadPoolExecutor(len(teams) or 1) as threads:
                for team, facts in zip(teams, threads.map(lambda team: team.ready(SETUP_LIMIT_S), teams), strict=True):
                    self.run["machine"] = self.run["machine"] or ({} if "error" in facts else facts)
                    if "error" in facts:
                        for name in team.names:
                            entries[name].fail(facts["error"])
            with ThreadPoolExecutor(self.arguments.jobs) as threads:

                def set_up(team: Team) -> None:
                    limit_s = SETUP_LIMIT_S * len(team.names)
                    team.set_up(entries, min(limit_s, max(1.0, self._end - time.monotonic())))
                    progress.update(len(team.names))

                list(threads.map(set_up, teams))
            for name, entry in entries.items():
                if entry.status == "not available":
                    self._not_available[name] = entry.message  # nor for the next workload
                self.run["machine"] |= entry.set_up.get("machine", {})
                if entry.status == "failed" and entry.message.startswith(NO_ANSWER) and self._end < time.monotonic():
                    entry.status, entry.message = "skipped", "time limit"
                    self._skipped = True
            self._store(workload.name, entries)
            team_of = {name: team for team in teams for name in team.names}
            self._rounds(workload, entries, team_of, progress)
            for name in [name for name in here if entries[name].status == "ok"]:
                reply = team_of[name].ask(entries, "finish", name)
                if reply is not None:
                    entries[name].notes = reply["notes"]
                    entries[name].gradient_error = max(entries[name].gradient_error or 0, reply["gradient_error"])

    def _rounds(
        self, workload: Workload, entries: dict[str, Entry], team_of: dict[str, Team], progress: tqdm[Any]
    ) -> None:
        running = [name for name, entry in entries.items() if entry.status == "ok"]
        share_s = self.arguments.seconds / self.arguments.rounds / max(1, len(running))
        plans = {name: steps_for(share_s, **entries[name].set_up) for name in running}
        for name, (_, steps, _) in plans.items():
            entries[name].steps_per_round = steps
        spent_s = dict.fromkeys(running, 0.0)
        end = min(time.monotonic() + 2 * self.arguments.seconds, self._end)
        for r in range(self.arguments.rounds):
            if r >= LEAST_ROUNDS and time.monotonic() > end:
                break
            # A slow one that has used up half of the budget is not asked again: it would take the time of the others.
            slow = {name for name in running if plans[name][0] == 0 and spent_s[name] > self.arguments.seconds / 2}
            running = [name for name in running if entries[name].status == "ok" and name not in slow]
            self._random.shuffle(running)
            for name in running:
                progress.set_description(f"{workload.name}, round {r + 1}, {name}", refresh=False)
                begin = time.monotonic()
                reply = team_of[name].ask(entries, "round", name, *plans[name])
                spent_s[name] += time.monotonic() - begin
                if reply is not None:
                    entries[name].wall_us[r] = reply["wall_us"]
                    if reply["host_us"] is not None:
                        entries[name].host_us[r] = reply["host_us"]
                progress.update()

    @contextmanager
    def _teams(self, groups: list[list[str]], workload: Workload, scratch: Path) -> Iterator[list[Team]]:
        teams: list[Team] = []
        try:
            for names in groups:
                teams.append(Team(names, workload.name, self.arguments, scratch))
            yield teams
        finally:
            with ThreadPoolExecutor(len(teams) or 1) as threads:
                list(threads.map(Team.end, teams))


def steps_for(share_s: float, step_s: float, cycle: int, **_: Any) -> tuple[int, int, int]:
    """Steps of a round: not timed, timed together (for half of the contestant's share of the time), host-timed.

    Whole cycles of batches where wall time is concerned.
    """
    if step_s * cycle > SLOW_CYCLE_S:
        return 0, cycle, min(cycle, 2)
    cycles = max(1, round(share_s / 2 / max(step_s, 1e-7) / cycle), -(-LEAST_STEPS // cycle))
    return cycle, cycles * cycle, max(2 * cycle, 8)


def commit() -> str:
    """The checkout's commit, with a + if files differ from it."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; defaults depend on the device."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="workloads: " + ", ".join(WORKLOADS) + ". contestants: " + ", ".join(CONTESTANTS) + ".",
    )
    parser.add_argument("--cpu", action="store_true", help="the CPU engine against eager and inductor")
    parser.add_argument("--workloads", type=_names(WORKLOADS), help="comma-separated (default: all of the device)")
    parser.add_argument("--contestants", type=_names(CONTESTANTS), help="comma-separated (default: all of the device)")
    parser.add_argument("--rounds", type=_positive(int), help="rounds per workload (default: 15; quick: 5)")
    parser.add_argument("--seconds", type=_positive(float), help="measuring per workload (default: 6; quick: 1)")
    parser.add_argument("--limit", type=_positive(float), default=470.0, help="seconds for everything (%(default)s)")
    parser.add_argument("--jobs", type=_positive(int), help="set-ups at a time (default: 1 per 4 cores, at most 4)")
    parser.add_argument("--together", action="store_true", help="all contestants of a workload in one process")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for results (default: %(default)s)")
    parser.add_argument("--commit", help="what is measured, where it is not a git checkout")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: does it run?")
    arguments = parser.parse_args(given)
    arguments.device = "cpu" if arguments.cpu else "cuda"
    arguments.workloads = arguments.workloads or [n for n, w in WORKLOADS.items() if arguments.device in w.devices]
    arguments.contestants = arguments.contestants or [
        name for name, contestant in CONTESTANTS.items() if arguments.device in contestant.devices
    ]
    arguments.rounds = arguments.rounds or (5 if arguments.quick else 15)
    arguments.seconds = arguments.seconds or (1.0 if arguments.quick else 6.0)
    arguments.jobs = arguments.jobs or min(4, max(1, (os.cpu_count() or 1) // 4))
    return arguments


def _names(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return list(dict.fromkeys(found))

    return names


def _positive(kind: type[int] | type[float]) -> Any:
    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not more than 0")
        return value

    number.__name__ = kind.__name__
    return number


def main() -> int:
    """Measure, print, draw; 1 if eager or a contestant of fxgraph's failed or is wrong, else 0."""
    arguments = parse_arguments()
    (arguments.out / "logs").mkdir(parents=True, exist_ok=True)
    comparison = Comparison(arguments)
    try:
        comparison.measure_all()
    except KeyboardInterrupt:
        comparison.save()
        print("interrupted; what has been found so far:", file=sys.stderr)
    run = comparison.run
    text = report.tables(run)
    (arguments.out / "compare.txt").write_text(text)
    print(text)
    try:
        report.plot(run, arguments.out)
    except ImportError as error:
        print(f"no plot: {error}. Later: python benchmarks/report.py {arguments.out}/compare.json", file=sys.stderr)
    bad = [
        f"{workload}: {name}: {entry['status']}: {entry['message']}"
        for workload, found in run["workloads"].items()
        for name, entry in found["contestants"].items()
        if entry["status"] in ("wrong", "failed") and (name == "eager" or name.startswith("fxgraph"))
    ]
    print(*bad, sep="\n", file=sys.stderr, end="\n" if bad else "")
    print(f"results: {arguments.out}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
