"""What a run has found, as data: per contestant its figures, its ratios and the verdict on its gradients.

The JSON has ``format``, ``date`` (UTC), ``commit``, ``device``, ``machine``, ``settings``, ``complete`` and
``workloads``: for each name its ``description`` and ``contestants``. For each contestant:

* ``status``: ``ok``, ``wrong``, ``failed``, ``not available`` or ``skipped``; ``message``: why, else empty; ``notes``.
* ``wall_us``, ``host_us``, ``ratio_to_bare``, ``ratio_to_eager``: ``{"median", "q1", "q3", "rounds"}`` or null. A ratio
  is that of the wall times of the same round.
* ``setup_s``, ``reserved_mib``, ``peak_mib``, ``gradient_error``, ``gradient_bound``, ``steps_per_round``: numbers or
  null.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = 1

LEAST_BOUND = 1e-5
"""Gradients this close to float64's are right whatever eager's error: some 100 roundings of float32 (6e-8)."""


@dataclasses.dataclass
class Entry:
    """One contestant on one workload."""

    status: str = "skipped"
    message: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    set_up: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gradient_error: float | None = None
    steps_per_round: int | None = None
    wall_us: dict[int, float] = dataclasses.field(default_factory=dict)  # by round
    host_us: dict[int, float] = dataclasses.field(default_factory=dict)

    def fail(self, message: str) -> None:
        """The contestant raised, or its process died."""
        self.status, self.message = "failed", message

    def verdict(self, bound: float) -> tuple[str, str]:
        """Status and message: ``wrong``, if a gradient is further from float64's than the bound."""
        error = self.gradient_error
        if self.status != "ok" or error is None or error <= bound:
            return self.status, self.message
        if not math.isfinite(error):
            return "wrong", "a gradient is missing, unexpected or NaN"
        return "wrong", f"gradient error {error:.2g} (bound {bound:.2g})"

    def as_json(self, bare: Entry | None, eager: Entry | None, bound: float) -> dict[str, Any]:
        """This entry as the JSON has it."""
        error = self.gradient_error
        status, message = self.verdict(bound if self is not eager else math.inf)
        return {
            "status": status,
            "message": message,
            "notes": self.notes,
            "wall_us": spread(list(self.wall_us.values())),
            "host_us": spread(list(self.host_us.values())),
            "ratio_to_bare": self.ratio_to(bare),
            "ratio_to_eager": self.ratio_to(eager),
            "setup_s": self.set_up.get("setup_s"),
            "reserved_mib": self.set_up.get("reserved_mib"),
            "peak_mib": self.set_up.get("peak_mib"),
            "gradient_error": error if error is not None and math.isfinite(error) else None,
            "gradient_bound": bound,
            "steps_per_round": self.steps_per_round,
        }

    def ratio_to(self, other: Entry | None) -> dict[str, Any] | None:
        """Wall time relative to another entry's, round by round."""
        if other is None:
            return None
        return spread([self.wall_us[r] / other.wall_us[r] for r in self.wall_us if r in other.wall_us])


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, quartiles and all values in the order of the rounds; None without values."""
    if not values:
        return None
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "q1": q1, "q3": q3, "rounds": list(values)}


def gradient_bound(eager: Entry | None) -> float:
    """How far gradients may be from float64's.

    Ten times eager's own error: contestants round in other orders, which moves the largest error by small factors,
    while a stale, doubled or missing gradient is off by 1 or more. Hence not more than 0.5, or half more than eager's
    where eager itself comes near that (bfloat16 behind many layers). 0.1 where eager was not measured.
    """
    if eager is None or eager.gradient_error is None or not math.isfinite(eager.gradient_error):
        return 0.1
    return max(LEAST_BOUND, min(10 * eager.gradient_error, 0.5), 1.5 * eager.gradient_error)


def workload_as_json(description: str, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """A workload as the JSON has it."""
    bare, eager = entries.get("bare"), entries.get("eager")
    bound = gradient_bound(eager)
    return {
        "description": description,
        "contestants": {name: entry.as_json(bare, eager, bound) for name, entry in entries.items()},
    }
