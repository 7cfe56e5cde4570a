"""What was captured, what was replayed, what ran eagerly and why."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch

from . import graphed as _graphed
from . import program as _program


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since graphing.

    Attributes:
        captures: one description per capture.
        replays: calls answered by a replay.
        eager_calls: calls that ran eagerly, as a whole or a part: of a graph, or the Python between graphs.
        eager_reasons: how many calls ran eagerly for which reason; 0 where a part was set aside before any call.
        pool_bytes: bytes that the memory pools hold.
    """

    captures: list[str]
    replays: int
    eager_calls: int
    eager_reasons: dict[str, int]
    pool_bytes: int


def stats(graphed: Any = None) -> Stats:
    """Counts for a graphed function or module, or the sum over everything that lives in the process.

    Raises:
        TypeError: if the argument is not graphed.
    """
    if graphed is None:
        callables, programs = list(_graphed.ALIVE), list(_program.ALIVE)
    else:
        if isinstance(graphed, torch.nn.Module):
            graphed = graphed.__dict__.get("forward")
        if not isinstance(graphed, _graphed.GraphedCallable):
            raise TypeError("fxgraph.stats() takes a graphed function or module, or nothing")
        callables = [graphed]
        programs = [p for p in _program.ALIVE if p.pools is graphed.pools and p.name.endswith(graphed.name)]
    reasons: collections.Counter[str] = collections.Counter()
    for found in [*(c.eager_reasons for c in callables), *(p.eager_reasons for p in programs)]:
        reasons.update(found)
    return Stats(
        captures=[f"{p.name}: {capture}" for p in programs for capture in p.captures.values()],
        replays=sum(p.replays for p in programs) + sum(c.past_replays for c in callables),
        eager_calls=sum(reasons.values()),
        eager_reasons=dict(reasons),
        pool_bytes=sum({id(p.pools): p.pools.bytes_held() for p in programs}.values()),
    )
