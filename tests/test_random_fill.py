"""passes/random_fill.py: dropout's draws land where eager puts them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from passes import DrawInPlace

aten = torch.ops.aten


def graph_of(function, *args):
    """The function as an aten graph on real tensors."""
    return make_fx(function)(*args)


def drop_mask(x):
    """What dropout's functional form draws."""
    return aten.bernoulli.p(aten.empty_like(x), 0.5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_draws_equal_those_of_the_in_place_op(memory_format):
    """For every layout of the argument the same elements are drawn as by ``empty_like(x).bernoulli_(p)``."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    rewritten = DrawInPlace()(graph_of(drop_mask, x)).graph_module
    torch.manual_seed(3)
    got = rewritten(x)
    torch.manual_seed(3)
    want = torch.empty_like(x).bernoulli_(0.5)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


def test_golden():
    """The graph before and after."""
    gm = graph_of(drop_mask, torch.randn(2, 3))
    assert "torch.ops.aten.bernoulli.p(empty_like, 0.5)" in gm.code
    result = DrawInPlace()(gm)
    assert result.modified
    assert "torch.ops.aten.bernoulli_.float(empty_like, 0.5)" in result.graph_module.code
    assert not DrawInPlace()(result.graph_module).modified


def test_memory_that_others_read_is_not_drawn_into():
    """An argument with another user, or one that is no new memory, keeps the functional op."""

    def shared(x):
        memory = aten.empty_like(x)
        return aten.bernoulli.p(memory, 0.5), memory

    def given(x):
        return aten.bernoulli.p(x, 0.5)

    for function in (shared, given):
        assert not DrawInPlace()(graph_of(function, torch.rand(2, 3))).modified
