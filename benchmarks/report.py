"""Table and plot of a run: ``python benchmarks/report.py compare.json`` makes both again from the JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate


def tables(run: Mapping[str, Any]) -> str:
    """A summary of ratios, then one table per workload."""
    machine = run["machine"]
    where = machine.get("card") or machine.get("processor") or run["device"]
    head = (
        f"{run['date']}, {where}, torch {machine.get('torch')}, Python {machine.get('python')}, "
        f"fxgraph {machine.get('fxgraph')} at {run['commit']}"
    )
    parts = [head + ("" if run["complete"] else "\nINCOMPLETE: the run was stopped or ran out of time")]
    parts.append(f"Wall time relative to {_floor(run)}, medians\n\n{_summary(run)}")
    for name, workload in run["workloads"].items():
        parts.append(f"{name}: {workload['description']}\n\n{_details(workload, run['device'])}")
    return "\n\n".join(parts) + "\n"


def _floor(run: Mapping[str, Any]) -> str:
    return "bare" if run["device"] == "cuda" else "eager"


def _summary(run: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(name for w in run["workloads"].values() for name in w["contestants"]))
    key = "ratio_to_" + _floor(run)
    rows = []
    for workload, found in run["workloads"].items():
        cells = []
        for name in names:
            entry = found["contestants"].get(name)
            if entry is None:
                cells.append("")
            elif entry["status"] in ("failed", "not available", "skipped"):
                cells.append({"failed": "failed", "not available": "n/a", "skipped": "–"}[entry["status"]])
            else:
                cells.append(_number(entry[key], 2) + (" wrong" if entry["status"] == "wrong" else ""))
        rows.append([workload, *cells])
    return str(tabulate(rows, ["workload", *names], disable_numparse=True, stralign="right", colalign=("left",)))


def _details(workload: Mapping[str, Any], device: str) -> str:
    rows = []
    for name, entry in workload["contestants"].items():
        status = "; ".join(filter(None, [entry["status"] + (f": {entry['message']}" if entry["message"] else "")]))
        remarks = [*([] if entry["status"] == "ok" else [status]), *entry["notes"]]
        row = [name, _with_quartiles(entry["wall_us"])]
        if device == "cuda":
            row += [_with_quartiles(entry["host_us"]), _number(entry["ratio_to_bare"], 2)]
        row += [_number(entry["ratio_to_eager"], 2)]
        if device == "cuda":
            row += [_plain(entry["reserved_mib"], ".0f"), _plain(entry["peak_mib"], ".0f")]
        row += [_plain(entry["setup_s"], ".2f"), _plain(entry["gradient_error"], ".1e"), "\n".join(remarks)]
        rows.append(row)
    cuda = device == "cuda"
    headers = ["contestant", "wall µs (quartiles)"]
    headers += ["host µs (quartiles)", "× bare"] if cuda else []
    headers += ["× eager"]
    headers += ["reserved MiB", "peak MiB"] if cuda else []
    headers += ["set-up s", "grad error", "remarks"]
    widths = [None] * (len(headers) - 1) + [70]
    return str(tabulate(rows, headers, disable_numparse=True, maxcolwidths=widths, colalign=("left",)))


def _with_quartiles(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "–"
    digits = 1 if value["median"] < 100 else 0
    return f"{value['median']:.{digits}f} ({value['q1']:.{digits}f}–{value['q3']:.{digits}f})"


def _number(value: Mapping[str, float] | None, digits: int) -> str:
    return "–" if value is None else f"{value['median']:.{digits}f}"


def _plain(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def plot(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Ratios with quartiles, one row per workload, as ``compare.png`` and ``compare.svg``.

    On CUDA relative to bare (to eager for workloads without a bare replay, which their labels say), on the CPU
    relative to eager.

    Raises:
        ImportError: where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    workloads = list(run["workloads"].items())
    names = list(dict.fromkeys(name for _, found in workloads for name in found["contestants"]))
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.75 * len(workloads)), layout="constrained")
    markers, colours = "osD^v<>Pp*X", pyplot.get_cmap("tab10")
    labels, drawn = [], set()
    for row, (workload, found) in enumerate(workloads):
        to_bare = any(entry["ratio_to_bare"] for entry in found["contestants"].values())
        key = "ratio_to_bare" if to_bare else "ratio_to_eager"
        labels.append(workload + (" (× eager)" if run["device"] == "cuda" and not to_bare else ""))
        for k, name in enumerate(names):
            entry = found["contestants"].get(name)
            ratio = entry and entry["status"] in ("ok", "wrong") and entry[key]
            if not ratio:
                continue
            wrong = entry["status"] == "wrong"
            axes.errorbar(
                ratio["median"],
                row + (k - (len(names) - 1) / 2) * 0.7 / len(names),
                xerr=[[ratio["median"] - ratio["q1"]], [ratio["q3"] - ratio["median"]]],
                color=colours(k % 10),
                marker="x" if wrong else markers[k % len(markers)],
                markersize=6,
                capsize=2,
                label=name if name not in drawn and not wrong else None,
            )
            if not wrong:
                drawn.add(name)
    axes.axvline(1, color="grey", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"wall time of forward + backward relative to {_floor(run)}; bars: quartiles; ×: wrong gradients")
    machine = run["machine"]
    axes.set_title(
        f"{machine.get('card') or machine.get('processor')}, torch {machine.get('torch')}, {run['date'][:10]}"
    )
    if drawn:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    paths = [folder / "compare.png", folder / "compare.svg"]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def main() -> int:
    """Print the tables of a JSON and draw its plot beside it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("json", type=Path)
    path: Path = parser.parse_args().json
    run = json.loads(path.read_text())
    print(tables(run))
    print("plots:", *plot(run, path.parent), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
