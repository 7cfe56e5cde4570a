"""Modules with known violations, written as their users would: exactly the right ids, at exactly the right lines."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from passes import check

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def expected_of(module: type[nn.Module]) -> list[tuple[str, int]]:
    """The ids that comments ``# ! id`` in the source stand for, each with its line."""
    lines, first = inspect.getsourcelines(module)
    found = []
    for number, line in enumerate(lines, first):
        marked = re.search(r"# ! ([\w\- ]+)$", line.rstrip())
        found += [(id, number) for id in (marked[1].split() if marked else ())]
    return found


@torch.library.custom_op("fxgraph_tests::log_to_disk", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def log_to_disk(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


log_to_disk.register_fake(torch.empty_like)


class Detector(nn.Module):
    """Keeps the boxes above a threshold and ranks what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.head(x).softmax(-1)
        best, label = scores.max(-1)
        keep = best > 0.3
        boxes = x[keep]  # ! data-dependent-shape
        count = keep.sum().item()  # ! host-sync
        classes = torch.unique(label)  # ! data-dependent-shape
        return boxes * count, classes, torch.where(keep, best, 0.0)


class Trainer(nn.Module):
    """A loss with dynamic scaling, statistics for a log, and a histogram."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (x - x.mean(0)).square().sum()
        scale = loss.detach().item()  # ! host-sync
        counts = torch.bincount((x > 0).long().view(-1))  # ! data-dependent-shape
        seen = torch.ops.fxgraph_tests.log_to_disk(loss)  # ! cudagraph-unsafe-op
        return loss * scale, counts.float(), seen


class Solver(nn.Module):
    """Linear algebra: what looks at its status, and what does not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = x @ x.t() + 4 * torch.eye(4)
        inverse = torch.linalg.inv(square)  # ! host-sync
        checked, _ = torch.linalg.inv_ex(square)
        flow = torch.matrix_exp(square)  # ! host-sync
        factor = torch.linalg.cholesky_ex(square).L
        return inverse + checked, flow, factor


class Indexer(nn.Module):
    """Indices of a fixed size beside those that data decides on."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top, where = x.topk(2, dim=-1)
        rows = x.gather(1, where)
        picked = x[torch.tensor([0, 2])]
        dense = F.embedding(where[:, 0] % 4, x)
        spots = (x > 0).nonzero()  # ! data-dependent-shape
        chosen = torch.masked_select(x, x > 0)  # ! data-dependent-shape
        repeated = top.repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=0)  # ! data-dependent-shape
        fixed = top.repeat_interleave(2, dim=0)
        return rows.sum() + picked.sum() + dense.sum() + fixed.sum(), spots, chosen, repeated


class Sparse(nn.Module):
    """Other layouts, and a copy that is none on the CPU."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sparse = x.relu().to_sparse()  # ! unsupported-layout
        again = sparse.to_dense()  # ! unsupported-layout
        dense = torch.dropout(x.to(torch.float64), 0.5, True)
        return again, dense.to(torch.float32).contiguous()


def found_in(gm: GraphModule) -> list[tuple[str, int]]:
    found = set()
    for violation in check(gm).violations:
        assert violation.where.file == __file__, violation
        assert violation.where.line is not None
        found.add((violation.id, violation.where.line))
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def by_dynamo(module: nn.Module) -> GraphModule:
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        torch.compile(module, backend=backend, fullgraph=True)(X)
    (graph,) = graphs
    return graph


def by_export(module: nn.Module) -> GraphModule:
    return torch.export.export(module, (X,), strict=False).module(check_guards=False)


def by_make_fx(module: nn.Module) -> GraphModule:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        traced: GraphModule = make_fx(
            module, tracing_mode="real", record_stack_traces=True, _error_on_data_dependent_ops=False
        )(X)
    return traced


def by_symbols(module: nn.Module) -> GraphModule:
    class Tracer(torch.fx.Tracer):
        record_stack_traces = True

    graph = Tracer().trace(module)
    return GraphModule(module, graph)


READERS: dict[str, Callable[[nn.Module], GraphModule]] = {
    "dynamo": by_dynamo,
    "export": by_export,
    "make_fx": by_make_fx,
    "symbolic_trace": by_symbols,
}


NO_GRAPH = {(Sparse, "dynamo")}  # Dynamo ends its graph at a sparse tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("module", [Detector, Trainer, Solver, Indexer, Sparse])
def test_the_ids_and_lines_are_those_that_the_source_says(module: type[nn.Module], reader: str) -> None:
    if (module, reader) in NO_GRAPH:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="sparse"):
            READERS[reader](module())
        return
    assert found_in(READERS[reader](module())) == expected_of(module)
