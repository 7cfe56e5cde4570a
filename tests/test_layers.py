"""Equal layers are lowered a few times, and the joint graph is the one that lowering all of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxgraph
from fxgraph import layers, stitching, trace
from fxgraph._torch_compat import aot
from fxgraph.graphed import as_function
from passes.aliasing import Aliases
from passes.facts import ops_of

WIDTH = 8


class Attention(nn.Module):
    """A transformer block: attention with views, then an MLP, each added to what came in."""

    def __init__(self, eps: float = 1e-5, rate: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.rate, self.training)
        return x


class Stack(nn.Module):
    """Layers between a head and a tail, with something shared by all of them."""

    def __init__(self, blocks: list[nn.Module], shared: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.first(x)
        h = start.relu()
        for block in self.blocks:
            h = block(h) * self.scale + start
        return self.last(h)


class Two(nn.Module):
    """Two values go from layer to layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x, x.cos()
        for linear in self.linears:
            a, b = linear(b).sin() + a, b.exp().clamp(max=2) * a.detach()
        return a, b


def attention(count: int = 7, **how: Any) -> nn.Module:
    return nn.Sequential(*(Attention(**how) for _ in range(count)))


def mlp(count: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def with_other(change: Callable[[Attention], Any], at: int = 3) -> nn.Module:
    model = attention(8)
    change(model[at])
    return model


def sample() -> torch.Tensor:
    return torch.randn(2, 4, WIDTH)


def torch_level(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...], Any]:
    traced = trace.read(as_function(model), (x,), {})
    assert traced.graph is not None
    inputs = traced.flat_inputs((x,), {})
    return trace.specialise(traced.graph, inputs), inputs, traced.specs


def described(joint: fx.GraphModule) -> list[Any]:
    """A graph without its names: all that a node has, numbers of autograd counted from the first."""
    nodes = list(joint.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    first = min(node.meta["seq_nr"] for node in nodes if "seq_nr" in node.meta)
    aliases = Aliases.of(joint)
    found = []
    for node in nodes:
        args = pytree.tree_map_only(fx.Node, place.__getitem__, (list(node.args), dict(node.kwargs)))
        meta = {key: value for key, value in node.meta.items() if key not in ("val", "from_node", "seq_nr", "desc")}
        found.append(
            (
                (node.op, node.target if node.op != "placeholder" else None, str(args)),
                sorted((key, str(value)) for key, value in meta.items()),
                node.meta.get("seq_nr", first) - first,
                [source.name for source in node.meta.get("from_node", ())],
                node.meta.get("desc"),
                [looks(value) for value in pytree.tree_leaves(node.meta.get("val"))],
                aliases.storage(node),
                aliases.storage(node) in aliases.outside,
            )
        )
    return found


def looks(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes = value.size(), value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return type(value), value.dtype, value.device, value.requires_grad, sizes


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


COPIED: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer blocks": (attention, sample),
    "whose input requires grad": (attention, lambda: sample().requires_grad_()),
    "with dropout": (lambda: attention(rate=0.5), sample),
    "as few as can be": (lambda: attention(6), sample),
    "in evaluation": (lambda: frozen(attention()), sample),
    "linear and GELU": (lambda: mlp(20), sample),
    "with head, tail and what all read": (lambda: Stack([Attention() for _ in range(6)]), sample),
    "two values": (lambda: Two(9), sample),
    "two kinds": (lambda: nn.Sequential(mlp(12), attention(6)), sample),
    "the first are frozen": (lambda: nn.Sequential(frozen(attention(6)), attention(6)), sample),
}


@pytest.mark.parametrize(
    ("name", "for_inductor"),
    [*((name, False) for name in COPIED), ("with dropout", True), ("with head, tail and what all read", True)],
)
def test_the_joint_graph_is_that_of_all_layers(name: str, for_inductor: bool) -> None:
    model, x = (make() for make in COPIED[name])
    graph, inputs, _ = torch_level(model, x)
    short = layers.shorten(graph, inputs)
    assert short is not None and len(short.graph.graph.nodes) < len(graph.graph.nodes)
    whole, metadata = aot.export_joint(graph, inputs, for_inductor)
    taken = tuple(inputs[i] for i in short.taken)
    found = stitching.lengthen(short, *aot.export_joint(short.graph, taken, for_inductor))
    assert found is not None
    joint, its_metadata = found
    joint.graph.lint()
    for got, expected in zip(described(joint), described(whole), strict=True):
        assert got == expected
    assert its_metadata.input_info == metadata.input_info
    assert str(its_metadata.output_info) == str(metadata.output_info)
    assert its_metadata.num_forward_returns == metadata.num_forward_returns


# -- what is not copied -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """A layer that writes what it is given."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).exp()
        self.function(x)
        return x.sin().cos()


class Collecting(nn.Module):
    """Gives what each layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for linear in self.linears:
            x = linear(x).sin().cos()
            found.append(x)
        return found


class Skipping(nn.Module):
    """Each layer reads what the one before the one before it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.cos()
        for linear in self.linears:
            x, before = linear(x).sin() + before.tanh(), x
        return x


def in_place(function: Callable[[torch.Tensor], Any]) -> nn.Module:
    return nn.Sequential(*(InPlace(function) for _ in range(8)))


def set_item(x: torch.Tensor) -> None:
    x[0] = 1


NOT_COPIED: dict[str, Callable[[], nn.Module]] = {
    "too few": lambda: attention(5),
    "in-place method": lambda: in_place(lambda x: x.mul_(2)),
    "in-place function": lambda: in_place(lambda x: F.relu(x, inplace=True)),
    "in-place function, by position": lambda: in_place(lambda x: F.relu(x, True)),
    "item set": lambda: in_place(set_item),
    "BatchNorm's statistics": lambda: nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()) for _ in range(16))),
    "what each gives is returned": Collecting,
    "two layers back": Skipping,
}


@pytest.mark.parametrize("name", NOT_COPIED)
def test_other_layers_are_lowered_each(name: str) -> None:
    graph, inputs, _ = torch_level(NOT_COPIED[name](), sample())
    assert layers.shorten(graph, inputs) is None


def other_eps(block: Any) -> None:
    block.norm1.eps = 1e-3


def other_rate(block: Any) -> None:
    block.rate = 0.25


def freeze(block: Any) -> None:
    block.up.bias.requires_grad_(False)


def transpose(block: Any) -> None:
    block.out.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


def share(block: Any) -> None:
    block.norm1.weight = block.norm2.weight


@pytest.mark.parametrize("change", [other_rate, freeze, transpose])
def test_a_layer_that_differs_is_lowered_by_itself(change: Callable[[Any], None]) -> None:
    model = attention(15)
    change(model[7])  # seven equal ones before it and seven behind
    graph, inputs, _ = torch_level(model, sample())
    short = layers.shorten(graph, inputs)
    assert short is not None and len(short.layers) == 7
    its_own = {i for i, tensor in enumerate(inputs) if any(tensor is one for one in model[7].parameters())}
    assert its_own and its_own <= set(short.taken)
    assert its_own.isdisjoint(i for layer in short.own for i in layer)


@pytest.mark.parametrize("change", [other_eps, share])
def test_a_run_that_a_single_call_interrupts_is_not_found(change: Callable[[Any], None]) -> None:
    """``find_repeats`` takes the layers without that call then, which do not stand one behind the other."""
    model = attention(15)
    change(model[7])
    graph, inputs, _ = torch_level(model, sample())
    assert layers.shorten(graph, inputs) is None


# -- as a whole -------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls in each torch-level graph that AOTAutograd lowers."""
    found: list[int] = []
    original = aot.export_joint

    def export_joint(graph: fx.GraphModule, *args: Any) -> Any:
        found.append(len(ops_of(graph)))
        return original(graph, *args)

    monkeypatch.setattr(aot, "export_joint", export_joint)
    return found


def train(model: nn.Module, device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in range(3):
        x = torch.randn(2, 4, WIDTH, device=device)
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        seen.append(y.detach())
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("change", [other_eps, other_rate, freeze, share])
def test_a_layer_that_differs_trains_as_in_eager(change: Callable[[Any], None], device: str) -> None:
    eager = attention(13).to(device)
    change(eager[6])
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (torch.randn(2, 4, WIDTH, device=device),))
    torch.testing.assert_close(train(graphed, device), train(eager, device), rtol=0, atol=0)


@pytest.mark.parametrize("count", [7, 11])
def test_equal_layers_are_lowered_four_times_and_train_as_in_eager(count: int, traced: list[int], device: str) -> None:
    eager = Stack([Attention(rate=0.25) for _ in range(count)]).to(device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (torch.randn(2, 4, WIDTH, device=device),))
    # Four layers of 19 calls, and what is done with each, and three calls around them.
    assert traced == [4 * (19 + 2) + 3]
    torch.testing.assert_close(train(graphed, device), train(eager, device), rtol=0, atol=0)
    assert fxgraph.stats(graphed).eager_calls == 0


def test_where_the_lowered_layers_differ_all_are_lowered(
    traced: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(stitching, "_same_look", lambda one, two: False)
    eager = Stack([Attention() for _ in range(7)]).to(device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (torch.randn(2, 4, WIDTH, device=device),))
    assert traced == [4 * (19 + 2) + 3, 7 * (19 + 2) + 3]
    torch.testing.assert_close(train(graphed, device), train(eager, device), rtol=0, atol=0)


def test_an_op_of_a_copied_layer_leads_to_its_own_call() -> None:
    graph, inputs, specs = torch_level(mlp(20), sample())
    joint = trace.export(graph, specs, inputs)
    found = {trace.origin(joint, node) for node in ops_of(joint.gm)}
    assert found == {node.name for node in ops_of(graph)}


def test_equal_layers_are_copied_for_inductor_too(traced: list[int], device: str) -> None:
    eager = nn.Sequential(*(Attention() for _ in range(7))).to(device)
    x = torch.randn(2, 4, WIDTH, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), options={"kernels": "inductor"})
    assert len(traced) == 1 and traced[0] == 4 * 19
    torch.testing.assert_close(train(graphed, device), train(eager, device))
