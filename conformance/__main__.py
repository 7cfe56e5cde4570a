"""The command line: ``python -m conformance ops|models|captures|tables|upstream``."""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import in_worker, results, tables, workers
from .entries import ENTRIES
from .outcomes import Outcome

PRELOAD = "conformance.preload"
"""What the processes of the captures share; it is not for this one, which may use CUDA."""

HERE = Path(__file__).resolve().parent


def _shard(text: str) -> tuple[int, int]:
    """``3/10``: cases 3, 13, 23 ...; ``today/10``: another tenth each day."""
    index, _, count = text.partition("/")
    parts = int(count)
    which = datetime.date.today().toordinal() % parts if index == "today" else int(index)
    if not 0 <= which < parts:
        raise argparse.ArgumentTypeError(f"{text}: the first number must be in 0..{parts - 1}")
    return which, parts


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    common.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    common.add_argument("--timeout", type=float, default=180.0, help="seconds per case")
    common.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="every N-th case, from case I on")
    common.add_argument("--entries", nargs="+", default=list(ENTRIES), help="names, or module:attribute")
    common.add_argument("--only", nargs="+", default=[], help="names of ops or models")
    common.add_argument("--results", type=Path, default=None, help="a .jsonl file; finished cases in it are skipped")
    common.add_argument("--fresh", action="store_true", help="begin the results file anew")
    common.add_argument("--again", nargs="+", default=[], metavar="OUTCOME", help="run cases with these outcomes again")
    common.add_argument("--minutes", type=float, default=None, help="start no case after so many minutes")
    common.add_argument("--table", type=Path, default=None, help="write the table here at the end")

    ops = commands.add_parser("ops", parents=[common], help="torch's op database")
    ops.add_argument("--dtypes", nargs="+", default=["float32"], help="float32 bfloat16 complex64 integer ...")
    ops.add_argument("--variants", nargs="+", default=["function"], choices=["function", "inplace", "mutate"])
    ops.add_argument("--samples", type=int, default=4, help="of the database's samples per op, besides the made kinds")

    models = commands.add_parser("models", parents=[common], help="whole models, three training steps")
    models.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    models.add_argument(
        "--optimizers",
        nargs="+",
        default=None,
        choices=["foreach", "fused", "capturable"],
        help="all of them if not given, but for capturable on the CPU, which torch refuses",
    )
    models.add_argument("--timing", type=int, default=5, help="repetitions for the speed-up; 0: none")

    raw = commands.add_parser(
        "captures", help="what a bare CUDA graph does with torch's ops against what the rules say"
    )
    raw.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    raw.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    raw.add_argument("--timeout", type=float, default=30.0, help="seconds per op")
    raw.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="every N-th op, from op I on")
    raw.add_argument("--only", nargs="+", default=[], help="names of ops")
    raw.add_argument("--samples", type=int, default=2, help="of the database's samples per op, the first ones")
    raw.add_argument("--results", type=Path, default=None, help="a .jsonl file, begun anew")
    raw.add_argument(
        "--update", action="store_true", help="keep the file's rows of other ops, and replace those of these"
    )
    raw.add_argument("--minutes", type=float, default=None, help="start no op after so many minutes")
    raw.add_argument("--out", type=Path, default=None, help="write the differences here, as Markdown")

    table = commands.add_parser("tables", help="tables from results files")
    table.add_argument("--ops", type=Path, default=None)
    table.add_argument("--models", type=Path, nargs="+", default=None, help="of one device or of several")
    table.add_argument("--captures", type=Path, default=None, help="the exit status says whether a reason is missing")

    upstream = commands.add_parser("upstream", help="another project's own tests, with our names in place of theirs")
    upstream.add_argument("checkout", type=Path, help="PyTorch's or TransformerEngine's")
    upstream.add_argument("pytest_args", nargs=argparse.REMAINDER, help="more arguments for pytest")
    return parser.parse_args(argv)


def _progress(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # a machine without the extras: rows are written all the same
        return None
    return tqdm(total=total, unit="case", disable=None, smoothing=0.05)


def _run(args: argparse.Namespace, cases: list[Any], runner: workers.Runner, prepare: Any, **settings: Any) -> int:
    """Run what is not finished; the exit status says whether something failed."""
    path = args.results or results.FOLDER / f"{args.command}-{args.device}.jsonl"
    file = results.Results(path, results.environment(args.device, **settings), fresh=args.fresh, again=args.again)
    which, parts = args.shard
    mine = cases[which::parts]
    todo = [case for case in mine if case.key not in file.finished]
    print(f"{len(todo)} cases to run, {len(mine) - len(todo)} finished, shard {which}/{parts}; results: {path}")
    counts: Counter[str] = Counter()
    bar = _progress(len(todo))
    end = None if args.minutes is None else datetime.timedelta(minutes=args.minutes).total_seconds()
    rows = workers.run(
        todo, runner, prepare, jobs=args.jobs, timeout=args.timeout, row_of=in_worker.row_of, stop_starting_after=end
    )
    for row in rows:
        file.add(row)
        counts[row["outcome"]] += 1
        if bar is not None:
            bar.update()
            bar.set_postfix(counts, refresh=False)
        if Outcome(row["outcome"]).is_failure:
            said = next(iter([d["detail"] for d in row.get("details", [])] or row.get("reasons", {})), "")
            (print if bar is None else bar.write)(f"{row['outcome']}: {row['case']}: {said}")
    if bar is not None:
        bar.close()
    if args.table is not None:
        args.table.write_text(tables.ops(path) if args.command == "ops" else tables.models([path]))
    print(", ".join(f"{counts[o.value]} {o.value}" for o in Outcome if counts[o.value]) or "nothing to run")
    failed = sum(counts[o.value] for o in Outcome if o.is_failure)
    print(f"{sum(counts.values()) - failed} passed, {failed} failed")
    return int(failed > 0)


def _captures(args: argparse.Namespace) -> int:
    """Capture and judge; the exit status says whether a difference has no reason."""
    from . import captures, captures_table

    path = args.results or results.FOLDER / f"captures-{args.device}.jsonl"
    environment = results.environment(args.device, samples=args.samples)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there are cores run beside each other
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # see preload.py
    which, parts = args.shard
    cases = list(captures.cases(args.device, args.only))[which::parts]
    runner = functools.partial(in_worker.run_capture, device=args.device, samples=args.samples)
    prepare = functools.partial(in_worker.prepare_captures, args.device)
    for module in (PRELOAD, None):
        begun = 0
        file = results.Results(path, environment, fresh=not args.update)
        rows = workers.run(
            cases,
            runner,
            prepare,
            jobs=args.jobs,
            timeout=args.timeout,
            row_of=in_worker.row_of,
            stop_starting_after=None if args.minutes is None else 60 * args.minutes,
            preload=module,
        )
        bar = _progress(len(cases))
        try:
            for row in rows:
                file.add(row)
                begun += 1
                if bar is not None:
                    bar.update()
            break
        except RuntimeError as error:  # from workers.run: a process that cannot start
            if module is None:
                raise
            print(f"{error}; once more with processes that import everything themselves", file=sys.stderr)
        finally:
            if bar is not None:
                bar.close()
    if args.out is not None:
        args.out.write_text(captures_table.page(path))
    return _differences(path, args.device, len(cases) - begun)


def _differences(path: Path, device: str, missing: int = 0) -> int:
    """Say which differences have no reason; the exit status says whether any has none, or an op is missing."""
    from . import captures_table

    _, done = captures_table.read(path)
    lines = captures_table.unjustified(done, device)
    print("\n".join(lines + [f"{name}: {count}" for name, count in Counter(r["outcome"] for r in done).items()]))
    late = f", {missing} more not begun" if missing else ""
    print(f"{len(done)} ops{late}, {len(lines)} differences without a reason; results: {path}")
    return int(bool(lines or missing))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit status."""
    args = parse(argv)
    if args.command == "tables":
        if args.ops is not None:
            (HERE / "ops.md").write_text(tables.ops(args.ops))
        if args.models is not None:
            (HERE / "models.md").write_text(tables.models(args.models))
        if args.captures is None:
            return 0
        from . import captures_table

        (HERE / "captures.md").write_text(captures_table.page(args.captures))
        environment, _ = captures_table.read(args.captures)
        return _differences(args.captures, str(environment["device"]))
    if args.command == "upstream":
        from . import upstream

        return upstream.run(args.checkout, args.pytest_args)
    try:
        if args.command == "captures":
            return _captures(args)
        if args.command == "ops":
            from . import ops

            cases = list(ops.cases(args.device, args.dtypes, args.variants, args.entries, args.only))
            runner = functools.partial(in_worker.run_op, device=args.device, limit=args.samples)
            return _run(args, cases, runner, in_worker.prepare_ops, samples=args.samples)
        from . import models
        from .zoo import libraries

        optimizers = args.optimizers or [o for o in models.OPTIMIZERS if o != "capturable" or args.device == "cuda"]
        chosen = list(models.cases(args.precisions, optimizers, args.entries, args.only))
        runner = functools.partial(in_worker.run_model, device=args.device, timing=args.timing)
        return _run(args, chosen, runner, in_worker.prepare_models, libraries=libraries.versions())
    except (results.OtherRun, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
