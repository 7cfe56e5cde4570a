"""Repeated identical regions of a graph found, such as the n equal layers of a network: an analysis, no rewrite."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .constraint import as_graph_module
from .facts import called_module, describe_call, value_of, where_of
from .show import show_value

_BASE = 1_000_003  # of the rolling hash, modulo 2**64; every hit is compared in full


@dataclass(frozen=True)
class Region:
    """A run of consecutive calls.

    Attributes:
        nodes: the calls, in order.
        inputs: the nodes outside that it reads, each once, in the order in which it reads them first.
        outputs: its own nodes that something outside reads, in order.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Regions that are isomorphic: the same calls with the same constants, on values of the same sizes, strides, dtypes
    and devices, wired in the same way. Position by position their nodes, and their inputs, stand for each other.
    """

    regions: tuple[Region, ...]

    @property
    def count(self) -> int:
        """How many regions there are."""
        return len(self.regions)

    @property
    def size(self) -> int:
        """How many calls each region has."""
        return len(self.regions[0].nodes)

    @property
    def saved(self) -> int:
        """How many calls are repetitions of another."""
        return (self.count - 1) * self.size

    def __str__(self) -> str:
        first, *_ = nodes = self.regions[0].nodes
        place = next((place for place in map(where_of, nodes) if place.file), None)
        at = first.name if place is None else f"{place.file}:{place.line}"
        return f"{self.count} × {self.size} calls, first at {at}: {describe_call(first)} ..."


@dataclass(frozen=True)
class Repeats:
    """What `find_repeats` found: no node is in two regions.

    Attributes:
        groups: in the order in which they were found, those that save most first.
    """

    groups: tuple[Repeat, ...] = ()

    def __iter__(self) -> Iterator[Repeat]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        return "\n".join(map(str, self.groups)) if self.groups else "no repeats"


def find_repeats(gm: GraphModule, min_size: int = 3, max_size: int = 512) -> Repeats:
    """Find groups of isomorphic regions in the order of the graph.

    Greedy: the group that saves most calls, `Repeat.saved`, is taken first (of two that save the same, the one with the
    smaller regions, so that twelve equal layers are twelve regions and not two of six), then the next among the calls
    that are left. Works on graphs of every level; fake values, where there are any, must agree. The time grows with the
    number of calls times ``max_size``.

    Args:
        gm: the graph; it is not changed.
        min_size: the fewest calls that a region may have, 1 or more.
        max_size: the most calls that a region may have.

    Raises:
        TypeError: if ``gm`` is no GraphModule.
        ValueError: if ``min_size`` is less than 1 or more than ``max_size``.
    """
    as_graph_module(gm)
    if not 1 <= min_size <= max_size:
        raise ValueError(f"1 <= min_size <= max_size does not hold for {min_size} and {max_size}")
    search = _Search([node for node in gm.graph.nodes if node.op.startswith("call_")])
    groups = []
    while (group := search.best(min_size, max_size)) is not None:
        groups.append(Repeat(tuple(search.region(start, group.size) for start in group.starts)))
        search.take(group)
    return Repeats(tuple(groups))


@dataclass(frozen=True)
class _Group:
    starts: tuple[int, ...]
    size: int

    @property
    def saved(self) -> int:
        return (len(self.starts) - 1) * self.size


@dataclass
class _Search:
    nodes: list[Node]
    colours: list[int] = field(init=False)  # equal for calls that may stand for each other, wiring aside
    positions: dict[Node, int] = field(init=False)
    reads: list[list[Node]] = field(init=False)  # what each call reads, in order, as often as it reads it
    described: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: dict[Hashable, int] = {}
        self.reads = [_node_leaves(node) for node in self.nodes]
        self.described = {source: _describe(source) for reads in self.reads for source in reads}
        self.colours = [numbers.setdefault(_signature(node), len(numbers)) for node in self.nodes]
        self.positions = {node: position for position, node in enumerate(self.nodes)}

    def best(self, min_size: int, max_size: int) -> _Group | None:
        """The group that saves most, or None."""
        found: _Group | None = None
        count = len(self.nodes)
        prefix = _prefix_hashes(self.colours)
        for size in range(min_size, min(max_size, count // 2) + 1):
            if found is not None and (count // size - 1) * size <= found.saved:
                continue  # even a graph that consists of such regions alone would save no more
            for starts in self._candidates(prefix, size):
                if found is None or (len(starts) - 1) * size > found.saved:
                    group = self._largest_class(starts, size)
                    if group is not None and (found is None or group.saved > found.saved):
                        found = group
        return found

    def take(self, group: _Group) -> None:
        """Keep the calls of ``group`` from being found again."""
        for start in group.starts:
            for position in range(start, start + group.size):
                self.colours[position] = -1 - position

    def region(self, start: int, size: int) -> Region:
        """The calls from ``start`` on, with what they read and give."""
        nodes = self.nodes[start : start + size]
        inside = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        given = (node for node in nodes if any(user not in inside for user in node.users))
        return Region(tuple(nodes), tuple(read), tuple(given))

    def _candidates(self, prefix: torch.Tensor, size: int) -> Iterator[list[int]]:
        """Starts of windows of the same colours, as far as the hash tells."""
        hashes = _window_hashes(prefix, size)
        _, inverse, counts = torch.unique(hashes, return_inverse=True, return_counts=True)
        repeated = (counts > 1).nonzero().flatten().tolist()
        if not repeated:
            return
        wanted = torch.isin(inverse, torch.tensor(repeated))
        classes: dict[int, list[int]] = {}
        for start, kind in zip(wanted.nonzero().flatten().tolist(), inverse[wanted].tolist(), strict=True):
            classes.setdefault(kind, []).append(start)
        yield from classes.values()

    def _largest_class(self, starts: Sequence[int], size: int) -> _Group | None:
        """The isomorphic windows among ``starts`` that are most, none of them overlapping."""
        classes: dict[Hashable, list[int]] = {}
        for start in starts:
            kept = classes.setdefault(self._shape(start, size), [])
            if not kept or kept[-1] + size <= start:
                kept.append(start)
        largest = max(classes.values(), key=len)
        return _Group(tuple(largest), size) if len(largest) > 1 else None

    def _shape(self, start: int, size: int) -> Hashable:
        """What isomorphic windows have in common: colours, wiring inside, and the pattern of what they read."""
        outside: dict[Node, int] = {}
        wiring: list[Hashable] = []
        for position in range(start, start + size):
            for source in self.reads[position]:
                place = self.positions.get(source, -1)
                if place >= start:
                    wiring.append(place - start)
                else:
                    wiring.append(("input", outside.setdefault(source, len(outside)), self.described[source]))
        return tuple(self.colours[start : start + size]), tuple(wiring)


def _signature(node: Node) -> Hashable:
    """What a call is, its inputs aside: target, constants, the metadata of its value."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    constants = tuple(None if isinstance(leaf, Node) else (type(leaf), repr(leaf)) for leaf in leaves)
    target = node.target if node.op == "call_function" else _callee(node)
    return node.op, target, constants, repr(spec), _describe(node)


def _callee(node: Node) -> Hashable:
    """A method by its name, a module by its type and settings: equal layers have modules of their own."""
    module = called_module(node)
    return str(node.target) if module is None else repr(module)


def _describe(node: Node) -> str:
    return show_value(value_of(node))


def _node_leaves(node: Node) -> list[Node]:
    leaves: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _prefix_hashes(colours: list[int]) -> torch.Tensor:
    """int64[n + 1]: the polynomial hash of each prefix, modulo 2**64."""
    hashes, value = [0], 0
    for colour in colours:
        value = (value * _BASE + colour + 1) % 2**64
        hashes.append(value)
    return torch.tensor([_signed(value) for value in hashes], dtype=torch.int64)


def _window_hashes(prefix: torch.Tensor, size: int) -> torch.Tensor:
    """int64[n - size + 1]: the hash of each window of ``size``; int64 arithmetic wraps around."""
    return prefix[size:] - prefix[:-size] * _signed(pow(_BASE, size, 2**64))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
