"""The differences between what a CUDA graph does with an op and what our rules say, and why those that stay do."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import captures
from .captures import AGREE, CAPTURES, LAXER, STRICTER
from .outcomes import Row
from .results import latest
from .tables import cell, table

RULES: dict[str, str] = {
    "unsupported-layout": "a sparse tensor gets new indices and values when it is filled, so a replay would read the "
    "old ones: the sweep's own inputs may be dense and its results unread",
}
"""By rule: why it may refuse what captures and replays right here."""

OPS: dict[tuple[str, str], str] = {
    ("torch_ops_aten__flash_attention_forward", LAXER): (
        "the state of its dropout, which it leaves unwritten, in eager too, where there is none to drop"
    ),
    ("ormqr", LAXER): "strides alone: the graph is traced, and on fake tensors the result is row-major",
    ("torch_ops_aten__efficient_attention_forward", LAXER): (
        "seed and offset of its dropout: torch has them on the CPU, but on the device while it captures; only the op's "
        "derivative reads them, and attention returns none of them"
    ),
}
"""By op and rule, the same; and by op and ``LAXER``: why it may be allowed though a capture fails."""

BARE: dict[str, str] = {
    "Cannot copy between CPU and CUDA tensors": "the op makes a constant on the CPU and copies it; in the graph it is "
    "on the device",
    "operation not permitted when stream is capturing": "autograd's formula reads a value on the host; that for fake "
    "tensors, which is in the graph, does not",
}
"""By a part of the message with which a bare capture fails: why the graph of the op is captured all the same."""

CPU = "the CPU engine runs on the host, which reads values as it likes"
"""Why every rule may be stricter than it."""

Difference = tuple[Row, Row]
"""A row and one of its samples."""


def reason(op: str, ids: Iterable[str], relation: str, device: str) -> str | None:
    """Why a difference is right; None if nothing says so. All the rules that refuse an op must be justified.

    Args:
        op: its name in the database, with or without the variant.
        ids: of the rules that refuse it.
        relation: ``STRICTER`` or ``LAXER``.
        device: where the capture was made.
    """
    if relation == STRICTER and device.startswith("cpu"):
        return CPU
    found = []
    for what in ids if relation == STRICTER else [LAXER]:
        said = OPS.get((op, what)) or (RULES.get(what) if relation == STRICTER else None)
        if said is None:
            return None
        found.append(said)
    return "; ".join(dict.fromkeys(found)) or None


def differences(rows: Iterable[Row], relation: str) -> list[Difference]:
    """The samples of that relation: the first of each op and outcome."""
    return _first(rows, lambda sample: sample["relation"] == relation)


def bare_alone(rows: Iterable[Row]) -> list[Difference]:
    """Samples whose graph is captured, though the bare op is not: the first of each op and outcome."""
    return _first(rows, lambda sample: sample.get("graph") == CAPTURES and sample["raw"] != CAPTURES)


def _first(rows: Iterable[Row], chosen: Callable[[Row], bool]) -> list[Difference]:
    found: dict[tuple[str, ...], Difference] = {}
    for row in rows:
        for sample in filter(chosen, row.get("samples", [])):
            found.setdefault((row["op"], *sample["ids"], str(sample["raw"])[:40]), (row, sample))
    return list(found.values())


def why_bare(sample: Row) -> str | None:
    """Why the bare op is not captured, where its graph is; None if nothing says so."""
    return next((why for part, why in BARE.items() if part in sample["raw"]), None)


def complete(row: Row) -> Row:
    """A row whose process died or hung, with the sample that its last words are about; other rows as they are."""
    if "samples" in row:
        return row
    said = "; ".join(row.get("reasons", {}))
    match = re.search(r"sample (\d+): capture; verdict: (.*)$", said)
    if match is None:
        return {**row, "samples": []}
    ids = [] if match[2] == "allowed" else match[2].split(", ")
    raw = f"{captures.FAILS}: {said.partition(', at: ')[0]}"
    sample = {"sample": int(match[1]), "raw": raw, "ids": ids, "relation": captures.relation(raw, ids)}
    return {**row, "samples": [sample], "outcome": sample["relation"]}


def unjustified(rows: Sequence[Row], device: str) -> list[str]:
    """One line for each difference without a reason, and for each op that gave no result."""
    lines = [f"no result: {row['op']}: {said(row)}" for row in rows if lost(row)]
    lines += [f"allowed, but torch would not capture {op}: {row}" for row, _, op in against_torch(rows)]
    for row, sample in bare_alone(rows):
        if why_bare(sample) is None:
            lines.append(f"only its graph captures: {row['op']}: {sample['raw']}")
    for relation in (LAXER, STRICTER):
        for row, sample in differences(rows, relation):
            if reason(row["op"], sample["ids"], relation, device) is None:
                lines.append(f"{relation}: {row['op']}: {_outcome(sample)}; {_verdict(sample)}")
    return lines


def against_torch(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Samples that the rules allow and torch's own compiler would leave out of CUDA graphs: op, dtype, ATen op."""
    return [
        (row["op"], row["dtype"], sample["unsafe"])
        for row in rows
        for sample in row["samples"]
        if sample.get("unsafe") and not sample["ids"]
    ]


def lost(row: Row) -> bool:
    """Whether the op's process died or hung where neither eager nor a capture was at fault."""
    return not row["samples"] and row["outcome"] != captures.SKIPPED


def said(row: Row) -> str:
    """The reasons of a row in one line."""
    return "; ".join(row.get("reasons", {}))


def _verdict(sample: Row) -> str:
    return ", ".join(sample["ids"]) or "allowed"


def _outcome(sample: Row) -> str:
    """What the capture did that the relation is about."""
    graph = sample.get("graph", "")
    return f"its graph {graph}" if graph not in ("", CAPTURES) else str(sample["raw"])


def read(path: Path) -> tuple[Row, list[Row]]:
    """The environment and the completed rows of a results file."""
    everything = latest(path)
    environment = everything.pop("environment")
    return environment, [complete(row) for row in everything.values()]


def page(path: Path) -> str:
    """The differences as Markdown."""
    environment, rows = read(path)
    device = str(environment["device"])
    facts = {name: value for name, value in environment.items() if name != "case"}
    facts["rows of"] = ", ".join(sorted({row["date"] for row in rows}))
    facts["revision"] = ", ".join(sorted({row["revision"] for row in rows if row["revision"]}))
    parts = ["# What CUDA graphs do with torch's ops, and what the rules say", ""]
    parts += ["Generated by `python -m conformance captures`; do not edit.", ""]
    if device.startswith("cpu"):
        parts += ["No GPU: the place of `torch.cuda.graph` is taken by fxgraph's CPU engine.", ""]
    parts += [table([(name, cell(str(value))) for name, value in facts.items()], ["", ""]), ""]
    parts += ["## Counts", "", _counts(rows), ""]
    for relation, title in (
        (LAXER, "Allowed, but the capture fails or a replay is wrong"),
        (STRICTER, "Refused, but captured and replayed right"),
    ):
        found = differences(rows, relation)
        parts += [f"## {title}", "", _differences(found, relation, device) if found else "None.", ""]
    bare = bare_alone(rows)
    if bare:
        parts += ["## Allowed: the bare op is not captured, its graph is", "", _bare(bare), ""]
    against = against_torch(rows)
    if against:
        title = "## Allowed, but torch's own compiler would not capture it"
        parts += [title, "", table(against, ["op", "dtype", "because of"]), ""]
    missing = [(row["op"], row["dtype"], cell(said(row))) for row in rows if lost(row)]
    if missing:
        parts += ["## No result", "", table(missing, ["op", "dtype", "why"]), ""]
    return "\n".join(parts)


def _counts(rows: Sequence[Row]) -> str:
    samples = [sample for row in rows for sample in row["samples"]]
    kinds: collections.Counter[tuple[str, str]] = collections.Counter()
    for sample in samples:
        outcome = str(sample.get("graph") or sample["raw"]).partition(":")[0]
        kinds[outcome, "refused" if sample["ids"] else "allowed"] += 1
    outcomes = [CAPTURES, captures.WRONG, captures.FAILS]
    body = [(outcome, kinds[outcome, "allowed"], kinds[outcome, "refused"]) for outcome in outcomes]
    relations = collections.Counter(row["outcome"] for row in rows)
    agreed = f"{relations[AGREE]} of {len(rows)} ops agree in all their samples"
    others = ", ".join(f"{count} {name}" for name, count in sorted(relations.items()) if name != AGREE)
    skipped = sum(sample["relation"] == captures.SKIPPED for sample in samples)
    text = f"{agreed}{f' ({others})' if others else ''}. Samples ({skipped} more that eager itself cannot run):"
    return "\n".join([text, "", table(body, ["", "allowed", "refused"])])


def _bare(found: Sequence[Difference]) -> str:
    body = [
        (row["op"], row["dtype"], sample["sample"], cell(str(sample["raw"])), why_bare(sample) or "**unjustified**")
        for row, sample in found
    ]
    return table(body, ["op", "dtype", "sample", "capture of the bare op", "reason"])


def _differences(found: Sequence[Difference], relation: str, device: str) -> str:
    body = []
    for row, sample in found:
        ids: list[str] = sample["ids"]
        why = reason(row["op"], ids, relation, device) or "**unjustified**"
        told = _outcome(sample) if relation == LAXER else "; ".join([_verdict(sample), *sample.get("observed", [])])
        body.append((row["op"], row["dtype"], sample["sample"], cell(str(told)), why))
    return table(body, ["op", "dtype", "sample", "capture" if relation == LAXER else "rule and what it saw", "reason"])
