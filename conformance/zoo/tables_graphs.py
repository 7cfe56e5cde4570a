"""Graphs, sets and tables."""

from __future__ import annotations

import torch
from torch import nn

from .base import Batch, Spec


class MessagePassing(nn.Module):
    """A graph layer: gather along edges, scatter with addition, a mean by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(24, 16), nn.GRUCell(16, 8)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, attributes: torch.Tensor) -> torch.Tensor:
        source, target = edges
        message = self.message(torch.cat([x[source], x[target], attributes], -1)).relu()
        total = message.new_zeros(x.shape[0], 16).index_add(0, target, message)
        degree = message.new_zeros(x.shape[0]).scatter_add(0, target, message.new_ones(target.shape[0]))
        return self.update(total / degree.clamp(min=1)[:, None], x.to(total.dtype))


class GraphAttention(nn.Module):
    """A softmax over the edges that end in a node, by ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, attributes: torch.Tensor) -> torch.Tensor:
        source, target = edges
        v = self.value(x)
        score = self.score(torch.cat([v[source], v[target]], -1))[:, 0] + attributes[:, 0].to(v.dtype)
        top = score.new_zeros(x.shape[0]).scatter_reduce(0, target, score.detach(), "amax", include_self=False)
        weight = (score - top[target]).exp()
        total = weight.new_zeros(x.shape[0]).index_add(0, target, weight)
        mixed = (weight / total[target].clamp(min=1e-6))[:, None] * v[source]
        return mixed.new_zeros(x.shape[0], 8).index_add(0, target, mixed)


class PointNet(nn.Module):
    """A net per point, the maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.point(x).max(-1).values)


class Recommender(nn.Module):
    """``nn.EmbeddingBag`` over bags, pairwise products, a net over numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(4, 8), nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(numbers), *(bag(ids[:, i]) for i, bag in enumerate(self.bags))]
        stacked = torch.stack([p.to(parts[0].dtype) for p in parts], 1)
        products = stacked @ stacked.transpose(1, 2)
        upper = torch.triu_indices(4, 4, 1, device=numbers.device)
        return self.top(torch.cat([parts[0], products[:, upper[0], upper[1]]], -1)).sigmoid()


def spectral() -> nn.Module:
    """Spectral norm: buffers that every forward in training mode writes."""
    wrap = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(8, 16)), nn.LeakyReLU(0.2), wrap(nn.Linear(16, 1)))


class Quantizer(nn.Module):
    """Vector quantisation with a straight-through gradient and a codebook that follows as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encode(x).float()
        chosen = torch.cdist(z, self.codes).argmin(-1)
        code = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                count = torch.zeros(16, device=x.device).index_add(
                    0, chosen, torch.ones_like(chosen, dtype=torch.float)
                )
                total = torch.zeros_like(self.codes).index_add(0, chosen, z)
                mean = total / count.clamp(min=1)[:, None]
                self.codes.lerp_(torch.where(count[:, None] > 0, mean, self.codes), 0.1)
        return self.decode(z + (code - z).detach()), (z - code).square().mean()


def _graph() -> Batch:
    return (torch.randn(10, 8), torch.randint(10, (2, 30)), torch.randn(30, 8)), {}


SPECS = [
    Spec("gnn-scatter", MessagePassing, _graph),
    Spec("gnn-attention", GraphAttention, _graph),
    Spec("pointnet", PointNet, lambda: ((torch.randn(4, 3, 20),), {})),
    Spec("recommender", Recommender, lambda: ((torch.randn(6, 4), torch.randint(20, (6, 3, 5))), {})),
    Spec("spectral-norm", spectral, lambda: ((torch.randn(6, 8),), {})),
    Spec("vector-quantizer", Quantizer, lambda: ((torch.randn(12, 8),), {})),
]
