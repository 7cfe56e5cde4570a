"""Train a small convolutional net on handwritten digits in three ways, and check that all three learn the same.

The ways: plain eager PyTorch, `fxgraph.make_graphed_callables`, and `torch.compile(backend="graphed")`. The net has
BatchNorm (buffers that the forward changes) and dropout (random numbers), each epoch ends with a short batch (another
shape) and with a pass over the test set in eval mode (another graph). All of it is ordinary code: nothing in the loop
below knows that the model is graphed.

Run it with `make demo`, or `python examples/train_digits.py --help`.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# cuBLAS is deterministic only with a fixed workspace; it reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import fxgraph  # also registers the backend "graphed", so that it works where fxgraph is not installed

# How far the ways may be apart in loss and weights. On the CPU: not at all, since each runs the same kernels in the
# same order. On CUDA cuDNN may pick another algorithm for a convolution, by the free workspace it finds, which the
# memory pool of a capture changes; another algorithm adds in another order, and training makes the difference grow.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}


def make_net() -> nn.Module:
    """A net for 1×8×8 images and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8) in [0, 1] and their classes, a part to train on and a part to test on."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def load(device: str, seed: int) -> Digits:
        """Load scikit-learn's copy of the digits and split off a fifth for testing."""
        bunch = load_digits()
        images, classes = bunch.images.astype("float32")[:, None] / 16, bunch.target.astype("int64")
        parts = train_test_split(images, classes, test_size=0.2, random_state=seed, stratify=classes)
        train_x, test_x, train_y, test_y = (torch.from_numpy(part).to(device) for part in parts)
        return Digits(train_x, train_y, test_x, test_y)

    def train_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in random order; the last one is as short as it comes out."""
        order = torch.randperm(len(self.train_x)).to(self.train_x.device)
        for indices in order.split(size):
            yield self.train_x[indices], self.train_y[indices]

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in order."""
        yield from zip(self.test_x.split(size), self.test_y.split(size), strict=True)

    def steps(self, size: int) -> int:
        """How many training batches an epoch has."""
        return -(-len(self.train_x) // size)


@dataclass
class Way:
    """One way to run the net, and what training it that way gave."""

    name: str
    net: nn.Module  # holds the parameters
    call: Callable[[Tensor], Tensor]  # runs them
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # mean training loss of each epoch
    accuracies: list[float] = field(default_factory=list)  # on the test set, after each epoch
    seconds: list[float] = field(default_factory=list)  # of each epoch


def make_ways(net: nn.Module, sample: Tensor) -> list[Way]:
    """The three ways, each with a copy of the net."""

    def way(name: str, copied: nn.Module, call: Callable[[Tensor], Tensor]) -> Way:
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        return Way(name, copied, call, optimizer)

    eager, graphed, compiled = (copy.deepcopy(net) for _ in range(3))
    return [
        way("eager", eager, eager),
        way("make_graphed_callables", graphed, fxgraph.make_graphed_callables(graphed, (sample,))),
        way("torch.compile", compiled, torch.compile(compiled, backend="graphed")),
    ]


def train_epoch(way: Way, digits: Digits, batch_size: int, progress: tqdm) -> float:
    """One pass over the training set; returns the mean loss."""
    way.net.train()
    total = torch.zeros((), device=digits.train_x.device)
    for x, y in digits.train_batches(batch_size):
        way.optimizer.zero_grad()
        loss = F.cross_entropy(way.call(x), y)
        loss.backward()
        way.optimizer.step()
        total += loss.detach() * len(x)
        progress.update()
    return (total / len(digits.train_x)).item()


@torch.no_grad()
def test_accuracy(way: Way, digits: Digits, batch_size: int) -> float:
    """The share of the test set that is classified right."""
    way.net.eval()
    right = sum((way.call(x).argmax(1) == y).sum() for x, y in digits.test_batches(batch_size))
    return int(right) / len(digits.test_x)


def train(ways: list[Way], digits: Digits, epochs: int, batch_size: int, seed: int) -> None:
    """Train all ways side by side: each epoch of each way starts from the same seed."""
    with tqdm(total=epochs * len(ways) * digits.steps(batch_size), unit="step", mininterval=0.5) as progress:
        for epoch in range(epochs):
            for way in ways:
                progress.set_description(f"epoch {epoch + 1}/{epochs}, {way.name:22}", refresh=False)
                torch.manual_seed(seed + epoch)
                start = time.perf_counter()
                way.losses.append(train_epoch(way, digits, batch_size, progress))
                way.accuracies.append(test_accuracy(way, digits, batch_size))
                way.seconds.append(time.perf_counter() - start)


def disagreements(reference: Way, way: Way, tolerance: float, test_images: int) -> Iterator[str]:
    """Where `way` is further from `reference` than the tolerance, in words."""
    for epoch, (expected, got) in enumerate(zip(reference.losses, way.losses, strict=True), start=1):
        if not abs(got - expected) <= tolerance:  # not: a NaN is a disagreement
            yield f"{way.name}: training loss of epoch {epoch} is {got!r}, {reference.name}'s {expected!r}"
    # With a tolerance, an image on the border between two classes may fall to either side of it.
    images_apart = round(2 * tolerance * test_images)
    for epoch, (expected, got) in enumerate(zip(reference.accuracies, way.accuracies, strict=True), start=1):
        if abs(got - expected) * test_images > images_apart + 0.5:
            yield f"{way.name}: test accuracy after epoch {epoch} is {got:.4f}, {reference.name}'s {expected:.4f}"
    state = way.net.state_dict()
    for name, expected in reference.net.state_dict().items():
        difference = (state[name].double() - expected.double()).abs().max().item()
        if not difference <= tolerance:
            yield f"{way.name}: {name} ends {difference:.3g} away from {reference.name}'s"


@dataclass(frozen=True)
class Ran:
    """What of a way ran as a graph, and what did not."""

    captures: Counter[str]
    replays: int
    eager_calls: int
    eager_reasons: Counter[str]

    @staticmethod
    def of(stats: fxgraph.Stats) -> Ran:
        """Take what fxgraph counted."""
        captures = Counter(str(capture) for capture in stats.captures)
        return Ran(captures, stats.replays, stats.eager_calls, Counter(stats.eager_reasons))

    def __sub__(self, other: Ran) -> Ran:
        return Ran(
            self.captures - other.captures,
            self.replays - other.replays,
            self.eager_calls - other.eager_calls,
            self.eager_reasons - other.eager_reasons,
        )


def table(ways: list[Way]) -> str:
    """One row per way."""
    graphed = Ran.of(fxgraph.stats(ways[1].call))
    ran = [None, graphed, Ran.of(fxgraph.stats()) - graphed]
    rows = []
    for way, counted in zip(ways, ran, strict=True):
        row = [
            way.name,
            f"{way.losses[-1]:.6f}",
            f"{way.accuracies[-1]:.4f}",
            f"{way.seconds[0]:.2f}",
            f"{statistics.median(way.seconds[1:] or way.seconds):.2f}",
        ]
        if counted is None:
            row += ["-", "-", "all"]
        else:
            captures = "\n".join(sorted(counted.captures.elements())) or "none"
            reasons = "".join(f"\n{count}× {reason}" for reason, count in counted.eager_reasons.items())
            row += [captures, f"{counted.replays}", f"{counted.eager_calls}{reasons}"]
        rows.append(row)
    headers = ["way", "loss", "accuracy", "1st epoch", "s/epoch", "captures", "replays", "eager calls"]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, maxcolwidths=[None] * 5 + [42, None, 30])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training set (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one, else cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order, dropout, split (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch_size < 2:
        parser.error("--epochs must be at least 1 and --batch-size at least 2")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return arguments


def main() -> int:
    """Train, print the table, and return 0 if the three ways agree and 1 if not."""
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    digits = Digits.load(arguments.device, arguments.seed)
    if len(digits.train_x) % arguments.batch_size == 1:
        sys.exit(f"--batch-size {arguments.batch_size} leaves a last batch of one image, too few for BatchNorm")
    net = make_net().to(arguments.device)
    print(
        f"{len(digits.train_x)} digits to train on, {len(digits.test_x)} to test on, "
        f"batches of {arguments.batch_size}, torch {torch.__version__} on {arguments.device}"
    )
    ways = make_ways(net, digits.train_x[: arguments.batch_size].clone())
    train(ways, digits, arguments.epochs, arguments.batch_size, arguments.seed)
    print(table(ways))

    tolerance = TOLERANCE[arguments.device]
    found = [text for way in ways[1:] for text in disagreements(ways[0], way, tolerance, len(digits.test_x))]
    if found:
        print("The ways DISAGREE:", *found, sep="\n  ", file=sys.stderr)
        return 1
    how = "bit for bit" if tolerance == 0 else f"to within {tolerance:g}"
    print(f"Losses, accuracies, weights and BatchNorm statistics of the three ways agree {how}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
