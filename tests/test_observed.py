"""passes/observed.py: what an op of a torch-level graph writes and draws, whatever it is called."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxgraph
from passes.observed import observe


@torch.library.custom_op("fxgraph_tests::count_up", mutates_args=["counter"])
def count_up(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x * 2


@count_up.register_fake
def _(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call as in a torch-level graph, with the tensors among its arguments as values of placeholders."""
    graph = fx.Graph()

    def place(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["example_value"] = tensor
        return node

    args, kwargs = pytree.tree_map_only(torch.Tensor, place, (args, kwargs))
    return (graph.call_method if isinstance(target, str) else graph.call_function)(target, args, kwargs)


def vector() -> torch.Tensor:
    return torch.ones(4)


def number() -> torch.Tensor:
    return torch.ones(1)


def square() -> torch.Tensor:
    return torch.ones(4, 4)


def images() -> torch.Tensor:
    return torch.ones(2, 4, 6, 6)


def indices() -> torch.Tensor:
    return torch.tensor([0, 2])


NORM = (vector, vector)
WRITES: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], list[int]]] = [
    ("add", torch.add, (vector, vector), {}, []),
    ("operator.iadd", operator.iadd, (vector, vector), {}, [0]),
    ("setitem", operator.setitem, (vector, 0, 1.0), {}, [0]),
    ("add_", "add_", (vector, vector), {}, [0]),
    ("view", "view", (vector, 2, 2), {}, []),
    ("detach_", "detach_", (vector,), {}, []),
    ("relu by position", F.relu, (vector, True), {}, [0]),
    ("hardtanh by name", F.hardtanh, (vector,), {"inplace": True}, [0]),
    ("out", torch.add, (vector, vector), {"out": vector}, [2]),
    ("F.batch_norm", F.batch_norm, (images, *NORM), {"training": True}, [1, 2]),
    ("F.batch_norm in evaluation", F.batch_norm, (images, *NORM), {"training": False}, []),
    ("torch.batch_norm", torch.batch_norm, (images, *NORM, *NORM, True, 0.1, 1e-5, False), {}, [3, 4]),
    ("F.instance_norm", F.instance_norm, (images, *NORM), {"use_input_stats": True}, [1, 2]),
    ("embedding", F.embedding, (indices, square), {}, []),
    ("embedding with max_norm", F.embedding, (indices, square), {"max_norm": 1.0}, [1]),
    ("embedding_renorm_", torch.embedding_renorm_, (square, indices, 1.0, 2.0), {}, [0]),
    ("a packet of a custom op", torch.ops.fxgraph_tests.count_up, (vector, vector), {}, [1]),
    ("an overload of a custom op", torch.ops.fxgraph_tests.count_up.default, (vector, vector), {}, [1]),
    ("_foreach_add_", torch._foreach_add_, ([vector, vector], 1.0), {}, [0, 1]),
    ("a fused unscale", torch._amp_foreach_non_finite_check_and_unscale_, ([vector], number, number), {}, [0, 1]),
]


@pytest.mark.parametrize(("op", "given", "options", "written"), [one[1:] for one in WRITES], ids=[w[0] for w in WRITES])
def test_what_an_op_writes_is_seen(
    op: Any, given: tuple[Any, ...], options: dict[str, Any], written: list[int]
) -> None:
    args, kwargs = pytree.tree_map_only(types.FunctionType, lambda make: make(), (given, options))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    seen = observe(call(op, *args, **kwargs))
    assert seen is not None
    numbers = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(tensors)}
    assert sorted(numbers[storage] for storage in seen.written) == written
    assert all(map(torch.equal, tensors, before))  # nothing was computed
    with torch.no_grad():
        getattr(args[0], op)(*args[1:], **kwargs) if isinstance(op, str) else op(*args, **kwargs)
    changed = {i for i, (old, new) in enumerate(zip(before, tensors, strict=True)) if not torch.equal(old, new)}
    assert changed <= set(written)


DRAWS: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], bool]] = [
    ("sin", torch.sin, (vector(),), {}, False),
    ("matmul", operator.matmul, (square(), square()), {}, False),
    ("dropout", F.dropout, (vector(),), {}, True),
    ("dropout in evaluation", F.dropout, (vector(),), {"training": False}, False),
    ("fractional_max_pool2d", F.fractional_max_pool2d, (images(), 2), {"output_size": 3}, True),
    ("binomial", torch.binomial, (vector(), vector()), {}, True),
    ("a Dirichlet sample", torch._sample_dirichlet, (vector(),), {}, True),
    ("rand_like", torch.rand_like, (vector(),), {}, True),
    ("attention", F.scaled_dot_product_attention, (square()[None], square()[None], square()[None]), {}, False),
    ("attention with dropout", F.scaled_dot_product_attention, (square()[None],) * 3, {"dropout_p": 0.5}, True),
    ("uniform_", "uniform_", (vector(),), {}, True),
    ("a custom op", torch.ops.fxgraph_tests.count_up, (vector(), vector()), {}, True),  # it could
]


@pytest.mark.parametrize(("op", "given", "options", "draws"), [one[1:] for one in DRAWS], ids=[d[0] for d in DRAWS])
def test_what_an_op_draws_is_seen(op: Any, given: tuple[Any, ...], options: dict[str, Any], draws: bool) -> None:
    state = torch.get_rng_state()
    seen = observe(call(op, *given, **options))
    assert seen is not None and seen.draws == draws
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "node",
    [
        call(torch.nonzero, vector()),
        call("item", vector()[:1]),
        call(len, "text"),
        call(torch.ops.higher_order.cond, vector()),
        call(lambda x: x.add_(1), vector()),
    ],
    ids=["a shape of data", "a number of data", "nothing of torch's", "an op of ops", "somebody's function"],
)
def test_what_cannot_be_seen_is_not_claimed(node: fx.Node) -> None:
    seen = observe(node)
    assert seen is None or (not (seen.written or seen.draws) and node.target is len)


# -- across a break ---------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Two uses of one op around a read of a value on the host."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.norm = nn.BatchNorm1d(4)
        self.table = nn.Embedding(6, 4, max_norm=0.5)
        self.register_buffer("counter", torch.zeros(1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.between(self, x)
        chosen = h[h.sum(1) > 0]
        return h, chosen.sum(), self.between(self, self.linear(x) + chosen.mean()), self.counter * 1


def with_counter(module: Any, x: torch.Tensor) -> torch.Tensor:
    torch.ops.fxgraph_tests.count_up(x.detach(), module.counter)
    return x * module.counter.clone()


def with_statistics(module: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.batch_norm(x, None, None, module.norm.running_mean, module.norm.running_var, True, 0.1, 1e-5, False)
    return y + module.norm.running_mean


def with_a_table(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x + module.table.weight.sum(0) + module.table(torch.arange(4) % 3).sum(0) + module.table.weight.sum(0)


def with_a_pool(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.fractional_max_pool2d(x.expand(1, 1, *x.shape), 2, output_size=2).sum()


def with_a_sample(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch._sample_dirichlet(x.detach().abs() + 0.5) + torch.binomial(
        x.detach().abs() * 0 + 5, x.detach().sigmoid()
    )


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("between", [with_counter, with_statistics, with_a_table, with_a_pool, with_a_sample])
def test_writes_and_draws_keep_their_order_across_a_break(between: Callable[..., Any], entry: str) -> None:
    def train(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module: Any = Breaks(between)
        x = torch.randn(4, 4)
        if graphed:
            if entry == "torch.compile":
                module = torch.compile(module, backend="graphed")
            else:
                module = fxgraph.make_graphed_callables(module, (x,), allow_unused_input=True)
        torch.manual_seed(1)
        seen = []
        for _ in range(3):
            x = torch.randn(4, 4, requires_grad=True)
            outputs = module(x)
            sum(out.sum() for out in outputs).backward()
            seen += [*(out.detach().clone() for out in outputs), x.grad]
        return [
            *seen,
            *(one.detach().clone() for one in (module.norm.running_mean, module.table.weight, module.counter)),
        ]

    for one, other in zip(train(graphed=True), train(graphed=False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
