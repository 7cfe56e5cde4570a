"""What is measured: models, their batches, and the loss of one training step.

Each workload builds the same weights and batches every time (seed 0, drawn on the CPU), so that contestants that live
in different processes work on the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


@dataclasses.dataclass
class Task:
    """A workload on a device: everything that a training step needs.

    Attributes:
        parts: modules that run one after the other; the first takes a batch, each other one the result before it.
        batches: what the steps run on in turn. More than one, so that no contestant may skip copying its input.
        autocast: the dtype of autocast, or None.
        checked: how many of the batches have their gradients compared with float64's.
        targets: of the loss, by shape; made at their first use.
    """

    parts: tuple[nn.Module, ...]
    batches: tuple[Batch, ...]
    autocast: torch.dtype | None = None
    checked: int = 4
    targets: dict[torch.Size, Tensor] = dataclasses.field(default_factory=dict)

    def context(self) -> AbstractContextManager[object]:
        """The context of forward and loss. No autocast cache: torch.cuda.make_graphed_callables refuses it."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.batches[0][0].device.type, dtype=self.autocast, cache_enabled=False)

    def parameters(self) -> list[Tensor]:
        """The parameters of all parts, in order."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def leaves(self, batch: Batch) -> list[Tensor]:
        """Everything that has a gradient after a step on this batch."""
        return [*self.parameters(), *(tensor for tensor in batch if tensor.requires_grad)]

    def loss(self, parts: Sequence[Callable[..., Tensor]], batch: Batch) -> Tensor:
        """The loss of a step: mean squared distance of the last part's result from random numbers, in float32.

        (In float64 if the result is.) Not from zero: the gradient of that nearly vanishes behind BatchNorm, and what
        bfloat16 leaves of it is mostly rounding.
        """
        values = batch
        for part in parts:
            values = (part(*values),)
        return self.distance(values[0])

    def distance(self, result: Tensor) -> Tensor:
        """The loss for a result of the last part."""
        target = self.targets.get(result.shape)
        if target is None:
            numbers = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
            target = self.targets[result.shape] = numbers.to(result.device)
        if result.dtype == torch.float64:
            target = target.double()
        return F.mse_loss(result.to(target.dtype), target)

    def samples(self) -> tuple[Batch, ...]:
        """Arguments for graphing each part: memory of their own, with the look of the first batch."""
        values: Batch = self.batches[0]
        found = [like(values)]
        for part in self.parts[:-1]:
            with torch.no_grad(), self.context():
                values = (part(*values),)
            found.append(tuple(torch.randn_like(value).requires_grad_() for value in values))
        return tuple(found)

    def in_float64(self) -> Task:
        """A copy with all floating-point numbers in float64 and without autocast."""
        batches = tuple(
            tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in batch)
            for batch in self.batches[: self.checked]
        )
        return Task(tuple(copy.deepcopy(part).double() for part in self.parts), batches)


def like(batch: Batch) -> Batch:
    """A copy in memory of its own, each tensor with the same layout and ``requires_grad``."""
    return tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A named task. ``devices``: where it belongs to the default set (it can be run anywhere by name)."""

    name: str
    description: str
    devices: tuple[str, ...]
    build: Callable[[], Task]

    def make(self, device: torch.device) -> Task:
        """The task on a device, the same numbers in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            task = self.build()
        batches = tuple(
            tuple(tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in batch)
            for batch in task.batches
        )
        return dataclasses.replace(task, parts=tuple(part.to(device) for part in task.parts), batches=batches)


# -- networks ---------------------------------------------------------------------------------------------------------


def mlp(layers: int, width: int) -> nn.Sequential:
    """Linear and GELU in turn. Kaiming's initialisation keeps the gradients of 64 layers at one scale."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        modules += [linear, nn.GELU()]
    return nn.Sequential(*modules)


class Block(nn.Module):
    """A transformer block with the norms first: attention, then an MLP four times as wide. (n, t, d) -> (n, t, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over all tokens, then the MLP, each added to what came in."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Residual(nn.Module):
    """ResNet's basic block: two 3×3 convolutions, each with BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        result: Tensor = F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
        return result


def resnet18() -> nn.Sequential:
    """ResNet-18 for 1000 classes (He et al. 2015, table 1)."""
    stages: list[nn.Module] = []
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class ColumnMeans(nn.Module):
    """Little work on a large input: (n, d) -> (d,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Means over rows of tanh of the scaled input."""
        return torch.tanh(x * self.scale + self.bias).mean(0)


class ManyInputs(nn.Module):
    """A sum over its inputs, each of shape (n, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Sum of tanh of each scaled input."""
        total = torch.tanh(inputs[0] * self.scale)
        for x in inputs[1:]:
            total = total + torch.tanh(x * self.scale)
        return total


class ManyParameters(nn.Module):
    """A chain of ``count / 2`` scalings and shifts: (n, d) -> (n, d)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(1 + 0.01 * torch.randn(width) for _ in range(count // 2))
        self.shifts = nn.ParameterList(0.01 * torch.randn(width) for _ in range(count // 2))

    def forward(self, x: Tensor) -> Tensor:
        """One multiply and one add per pair of parameters."""
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = x * scale + shift
        return x


class Guarded(nn.Module):
    """Two networks and between them a branch on data, which needs the value on the host."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """Halves what is between the networks if it has become large, as a guard against overflow would."""
        x = self.first(x)
        if x.detach().abs().amax().item() > 1e4:
            x = x / 2
        result: Tensor = self.second(x)
        return result


class UnrolledLstm(nn.Module):
    """An LSTM cell called once per time step: (t, n, d) -> (n, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden state after the last time step."""
        h = c = torch.zeros_like(x[0])
        for step in x.unbind():
            h, c = self.cell(step, (h, c))
        return h


# -- the list ---------------------------------------------------------------------------------------------------------


def _task(*parts: nn.Module, shape: tuple[int, ...], batches: int = 4, dtype: torch.dtype | None = None) -> Task:
    parts = tuple(part.to(dtype) for part in parts) if dtype else parts
    return Task(parts, tuple((torch.randn(*shape, dtype=dtype),) for _ in range(batches)))


def _blocks(count: int, width: int, heads: int) -> list[Block]:
    return [Block(width, heads) for _ in range(count)]


def _resnet() -> Task:
    images = tuple((torch.randn(8, 3, 224, 224).to(memory_format=torch.channels_last),) for _ in range(4))
    network = resnet18().to(memory_format=torch.channels_last)
    return Task((network,), images, autocast=torch.bfloat16)


def _many_inputs() -> Task:
    batches = tuple(tuple(torch.randn(64, 64).requires_grad_() for _ in range(32)) for _ in range(4))
    return Task((ManyInputs(64),), batches)


def _batch_sizes() -> Task:
    # The largest first: it is what a user would graph with.
    return Task((mlp(6, 256),), tuple((torch.randn(n, 256),) for n in range(64, 0, -8)), checked=8)


def _large_blocks() -> Task:
    task = _task(nn.Sequential(*_blocks(12, 1024, 16)), shape=(8, 512, 1024), dtype=torch.bfloat16)
    return dataclasses.replace(task, checked=1)  # the gradients in float64 take 1.2 GB per batch


def _large_input() -> Task:
    return dataclasses.replace(_task(ColumnMeans(1024), shape=(65536, 1024), batches=2), checked=1)


_GPU, _CPU = ("cuda",), ("cpu",)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp6", "6-layer MLP, 256 wide, batch 64, fp32", _GPU, lambda: _task(mlp(6, 256), shape=(64, 256))),
        Workload("mlp64", "64-layer MLP, 256 wide, batch 64, fp32", _GPU, lambda: _task(mlp(64, 256), shape=(64, 256))),
        Workload(
            "blocks12",
            "12 transformer blocks, d 256, 4×64 tokens, fp32, whole",
            _GPU,
            lambda: _task(nn.Sequential(*_blocks(12, 256, 4)), shape=(4, 64, 256)),
        ),
        Workload("blocks12-bf16", "12 transformer blocks, d 1024, 8×512 tokens, bf16", _GPU, _large_blocks),
        Workload("resnet18", "ResNet-18, batch 8, 224×224, channels_last, bf16 autocast", _GPU, _resnet),
        Workload("large-input", "one input of 256 MiB, little work", _GPU, _large_input),
        Workload("small-inputs", "32 small inputs that require grad", _GPU, _many_inputs),
        Workload(
            "small-params",
            "300 small parameters",
            _GPU,
            lambda: _task(ManyParameters(300, 64), shape=(64, 64)),
        ),
        Workload("batch-sizes", "6-layer MLP, 256 wide, batch sizes 64, 56, ..., 8 in turn", _GPU, _batch_sizes),
        Workload(
            "uncapturable",
            "6-layer MLP, 256 wide, a branch on .item() in the middle",
            _GPU,
            lambda: _task(Guarded(mlp(3, 256), mlp(3, 256)), shape=(64, 256)),
        ),
        Workload(
            "blocks12-each",
            "the 12 blocks of blocks12, each graphed on its own",
            _GPU,
            lambda: _task(*_blocks(12, 256, 4), shape=(4, 64, 256)),
        ),
        Workload(
            "mlp6-narrow", "6-layer MLP, 64 wide, batch 64, fp32", _CPU, lambda: _task(mlp(6, 64), shape=(64, 64))
        ),
        Workload(
            "lstm-unrolled",
            "LSTM cell, 64 wide, 16 steps unrolled, batch 32",
            _CPU,
            lambda: _task(UnrolledLstm(64), shape=(16, 32, 64)),
        ),
        Workload(
            "attention", "1 transformer block, d 64, 8×32 tokens", _CPU, lambda: _task(Block(64, 4), shape=(8, 32, 64))
        ),
        Workload(
            "large-ops", "2-layer MLP, 1024 wide, batch 512", _CPU, lambda: _task(mlp(2, 1024), shape=(512, 1024))
        ),
    )
}
