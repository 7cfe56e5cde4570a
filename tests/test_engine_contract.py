"""What ``fxgraph/engines/base.py`` promises, sentence by sentence, on every engine that this machine has."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxgraph
from fxgraph import engines
from fxgraph.engines import CapturedRegion, Engine, Pool

aten = torch.ops.aten


@pytest.fixture
def engine(device: str) -> Engine:
    return engines.get(device)


@pytest.fixture
def pool(engine: Engine, device: str) -> Pool:
    return engine.new_pool(torch.empty(0, device=device).device)


def affine(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scaled = aten.mul.Tensor(x, w)
    return (aten.add.Tensor(scaled, 1.0),)


def values(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [output.clone() for output in outputs]


def same(found: Any, expected: Any) -> None:
    """Equal bit by bit: a replay runs the kernels that the function would run."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def generator(device: str) -> torch.Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


# -- fixed addresses, overwriting, aliases ----------------------------------------------------------------------------


def test_replay_reads_inputs_and_writes_outputs_where_they_were_at_capture(
    engine: Engine, pool: Pool, device: str
) -> None:
    x, w = torch.ones(3, device=device), torch.full((3,), 2.0, device=device)
    region = engine.capture(pool, affine, [x, w], 1)
    buffer = region.outputs[0]
    address = buffer.data_ptr()
    for number in (5.0, -7.0):
        x.fill_(number)
        region.replay()
        assert region.outputs[0].data_ptr() == address
        same(buffer, torch.full((3,), number * 2 + 1, device=device))  # the same tensor, with a new value


def test_replay_takes_no_arguments(engine: Engine, pool: Pool, device: str) -> None:
    region = engine.capture(pool, affine, [torch.ones(3, device=device)] * 2, 0)
    with pytest.raises(TypeError):
        region.replay(torch.ones(3, device=device))  # type: ignore[call-arg]


def test_capture_leaves_the_outputs_with_shapes_and_strides_of_the_function(
    engine: Engine, pool: Pool, device: str
) -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.t.default(aten.neg.default(x)), aten.sum.default(x), aten.gt.Scalar(x, 0)

    x = torch.randn(2, 3, device=device)
    expected = region(x)
    captured = engine.capture(pool, region, [x], 1)
    for found, wanted in zip(captured.outputs, expected, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert found.device == wanted.device


def test_a_view_of_an_input_stays_one(engine: Engine, pool: Pool, device: str) -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.view.default(x, [4]), aten.neg.default(x)

    x = torch.zeros(2, 2, device=device)
    captured = engine.capture(pool, region, [x], 1)
    view, negative = captured.outputs
    x.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    same(view, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device))  # without a replay: it is the input's memory
    captured.replay()
    same(view, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device))
    assert negative.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_outputs_that_share_memory_share_it_at_each_replay(engine: Engine, pool: Pool, device: str) -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = aten.mul.Tensor(x, 3.0)
        return base, aten.select.int(base, 0, 1), base

    x = torch.ones(2, 2, device=device)
    captured = engine.capture(pool, region, [x], 1)
    base, row, again = captured.outputs
    for number in (1.0, 2.0):
        x.fill_(number)
        captured.replay()
        assert row.data_ptr() == base.data_ptr() + 2 * base.element_size()
        assert again.data_ptr() == base.data_ptr()
        base[1].fill_(-1.0)
        same(row, torch.full((2,), -1.0, device=device))


def test_an_input_returned_as_it_is_stays_the_input(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(2, device=device)
    captured = engine.capture(pool, lambda x: (x, aten.neg.default(x)), [x], 1)
    assert captured.outputs[0].data_ptr() == x.data_ptr()


def test_in_place_ops_write_the_input_at_each_replay(engine: Engine, pool: Pool, device: str) -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        updated = aten.copy_.default(x, aten.add.Tensor(x, 1.0))
        return (aten.mul.Tensor(updated, 2.0),)

    x = torch.zeros(3, device=device)
    captured = engine.capture(pool, region, [x], 0)
    x.zero_()
    for step in (1.0, 2.0, 3.0):
        captured.replay()
        same(x, torch.full((3,), step, device=device))
        same(captured.outputs[0], torch.full((3,), 2 * step, device=device))


# -- any op: a replay is what running the function would be -----------------------------------------------------------


def _inputs(*shapes: tuple[int, ...]) -> Callable[[str], list[torch.Tensor]]:
    return lambda device: [torch.randn(shape, device=device) for shape in shapes]


def _indices(device: str) -> list[torch.Tensor]:
    return [torch.randn(5, 3, device=device), torch.randint(0, 5, (4,), device=device)]


# name, function, its inputs drawn anew at each call.
OPS: list[tuple[str, Callable[..., Any], Callable[[str], list[torch.Tensor]]]] = [
    ("out form", lambda x: x.sin(), _inputs((3, 4))),
    ("several results", lambda x: x.max(dim=1), _inputs((3, 4))),
    ("list of views", lambda x: [part.exp() for part in x.split([1, 2])], _inputs((3, 4))),
    ("list of new tensors", lambda x: torch.split_copy(x, 2), _inputs((4, 3))),
    ("sort", lambda x: x.sort(dim=-1, descending=True), _inputs((3, 4))),
    ("topk", lambda x: x.topk(2), _inputs((3, 4))),
    ("var_mean", lambda x: torch.var_mean(x, dim=0), _inputs((3, 4))),
    ("cat", lambda x, y: torch.cat([x, y, x], dim=1), _inputs((2, 3), (2, 1))),
    ("matmul transposed", lambda x, y: x @ y.t(), _inputs((3, 4), (5, 4))),
    ("broadcast", lambda x, y: x + y, _inputs((3, 1), (1, 4))),
    ("expand", lambda x: x.expand(3, 4), _inputs((3, 1))),
    ("expanded copy", lambda x: x.expand(3, 4).contiguous(), _inputs((3, 1))),
    ("where", lambda x, y: torch.where(x > 0, x, y), _inputs((3, 4), (3, 4))),
    ("embedding", lambda w, i: torch.nn.functional.embedding(i, w), _indices),
    ("index", lambda w, i: w[i], _indices),
    ("index_put", lambda w, i: torch.index_put(w, [i], torch.ones(4, 3, device=w.device), True), _indices),
    ("scatter", lambda w, i: w.scatter(0, i[:, None].expand(4, 3), 2.0), _indices),
    ("one_hot by comparison", lambda w, i: (i[:, None] == torch.arange(5, device=i.device)).to(w.dtype) @ w, _indices),
    ("conv", lambda x, w, b: torch.conv2d(x, w, b, padding=1), _inputs((2, 3, 6, 6), (4, 3, 3, 3), (4,))),
    ("max_pool", lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True), _inputs((2, 3, 6, 6))),
    ("layer_norm", lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5), _inputs((3, 4), (4,))),
    ("group_norm", lambda x: torch.native_group_norm(x, None, None, 2, 4, 9, 2, 1e-5), _inputs((2, 4, 3, 3))),
    (
        "conv backward without the input's",
        lambda g, x, w: aten.convolution_backward(
            g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]
        )[1:],
        _inputs((2, 4, 6, 6), (2, 3, 6, 6), (4, 3, 3, 3)),
    ),
    ("softmax", lambda x: x.log_softmax(-1), _inputs((3, 4))),
    ("cumsum", lambda x: x.cumsum(0), _inputs((3, 4))),
    ("dtype", lambda x: (x.to(torch.float64), x.to(torch.int32), x > 0), _inputs((3, 4))),
    ("complex", lambda x: torch.fft.fft(torch.complex(x, -x)), _inputs((4,))),
    ("no element", lambda x: (x.exp(), x.sum(), x.reshape(0, 2)), _inputs((0, 3))),
    ("no dimension", lambda x: x * x, _inputs(())),
    ("channels last", lambda x: x.contiguous(memory_format=torch.channels_last).neg(), _inputs((2, 3, 4, 4))),
    ("strided result", lambda x: x.t().sin(), _inputs((3, 4))),
    ("constructed", lambda x: torch.zeros_like(x) + torch.arange(4, device=x.device), _inputs((3, 4))),
    ("as_strided", lambda x: x.as_strided((2, 3), (1, 2), 1) * 2, _inputs((12,))),
    ("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y), _inputs((3, 3), (3,))),
    ("attention", torch.nn.functional.scaled_dot_product_attention, _inputs(*[(1, 2, 5, 4)] * 3)),
    (
        "triangular",
        lambda x: torch.linalg.solve_triangular(x.triu() + 4 * torch.eye(3, device=x.device), x, upper=True),
        _inputs((3, 3)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("function", "draw"), [op[1:] for op in OPS], ids=[op[0].replace(" ", "-") for op in OPS])
def test_a_replay_gives_what_running_the_function_gives(
    function: Callable[..., Any], draw: Callable[[str], list[torch.Tensor]], engine: Engine, pool: Pool, device: str
) -> None:
    buffers = draw(device)
    region = make_fx(lambda *args: _flat(function(*args)))(*[buffer.clone() for buffer in buffers])
    captured = engine.capture(pool, region, buffers, 2)
    for _ in range(2):
        fresh = draw(device)
        for buffer, value in zip(buffers, fresh, strict=True):
            buffer.copy_(value)
        captured.replay()
        same(values(captured.outputs), values(region(*fresh)))


def _flat(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


# -- no Python, no autograd -------------------------------------------------------------------------------------------


def test_a_replay_runs_no_python_of_the_functions(engine: Engine, pool: Pool, device: str) -> None:
    calls = []

    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(1)
        return (aten.neg.default(x),)

    captured = engine.capture(pool, region, [torch.ones(2, device=device)], 1)
    before = len(calls)
    captured.replay()
    assert before > 0
    assert len(calls) == before


def test_a_region_on_tensors_that_require_grad_has_no_autograd_in_it(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    captured = engine.capture(pool, affine, [x, x], 1)
    captured.replay()
    assert not captured.outputs[0].requires_grad
    assert captured.outputs[0].grad_fn is None
    assert x.grad is None


def test_replay_does_not_depend_on_the_callers_modes(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(3, 3, device=device)
    region = lambda x: (aten.mm.default(x, x),)  # noqa: E731
    captured = engine.capture(pool, region, [x], 1)
    for mode in (torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16), torch.enable_grad()):
        x.copy_(torch.randn(3, 3))
        with mode:
            captured.replay()
        assert captured.outputs[0].dtype == torch.float32
        same(captured.outputs[0], x @ x)


@pytest.mark.parametrize("warmup", [2, 4])
def test_the_function_runs_warmup_times_more(engine: Engine, pool: Pool, device: str, warmup: int) -> None:
    def runs(warmup: int) -> float:
        x = torch.zeros(1, device=device)
        engine.capture(pool, lambda x: (aten.copy_.default(x, aten.add.Tensor(x, 1.0)),), [x], warmup)
        return x.item()

    assert runs(warmup) == runs(1) + warmup - 1
    assert runs(0) <= runs(1)  # CUDA warms up once at least


# -- randomness -------------------------------------------------------------------------------------------------------


def _mask(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = aten.bernoulli.p(x, 0.5)
    return aten.mul.Tensor(x, kept), kept


def _native_dropout(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, mask = aten.native_dropout.default(x, 0.3, True)
    return out, mask


def _several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    noise = aten.rand_like.default(x)
    normal = aten.randn_like.default(x)
    whole = aten.randint_like.default(x, 10)
    return noise, normal, whole, aten.add.Tensor(noise, normal)


RANDOM = pytest.mark.parametrize("region", [_mask, _native_dropout, _several], ids=lambda f: f.__name__.strip("_"))


@RANDOM
def test_a_replay_draws_what_running_the_function_would_and_leaves_the_generator_there(
    region: Callable[..., Any], engine: Engine, pool: Pool, device: str
) -> None:
    x = torch.ones(64, 9, device=device)
    captured = engine.capture(pool, region, [x], 3)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = [values(region(x)) for _ in range(3)]
        left_at = generator(device)
        torch.manual_seed(seed)
        found = []
        for _ in range(3):
            captured.replay()
            found.append(values(captured.outputs))
        same(found, expected)
        assert torch.equal(generator(device), left_at)
        assert not torch.equal(found[0][0], found[1][0])


def test_replays_and_eager_draws_interleave_as_if_all_were_eager(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(33, device=device)
    first, second = engine.capture(pool, _mask, [x], 1), engine.capture(pool, _several, [x], 1)

    def course(one: Callable[[], Any], two: Callable[[], Any]) -> list[Any]:
        torch.manual_seed(5)
        return [one(), torch.rand(5, device=device), two(), one(), torch.randn(3, device=device)]

    def replayed(region: CapturedRegion) -> list[torch.Tensor]:
        region.replay()
        return values(region.outputs)

    expected = course(lambda: values(_mask(x)), lambda: values(_several(x)))
    same(course(lambda: replayed(first), lambda: replayed(second)), expected)


def test_unchanged_puts_back_values_versions_and_generators(engine: Engine, device: str) -> None:
    x, y = torch.randn(3, device=device), torch.randn(2, device=device)
    expanded = torch.ones(1, device=device).expand(3)
    before, version, rng = x.clone(), x._version, generator(device)
    cpu_rng = torch.get_rng_state()
    with pytest.raises(KeyError), engine.unchanged([x, y, expanded]):
        x.add_(1)
        y.zero_()
        expanded[0] = 2
        torch.rand(7, device=device)
        torch.rand(7)
        raise KeyError("also when the body raises")
    assert torch.equal(x, before)
    assert torch.equal(expanded, torch.ones(3, device=device))
    assert x._version == version
    assert torch.equal(generator(device), rng)
    assert torch.equal(torch.get_rng_state(), cpu_rng)


def test_unchanged_takes_expanded_tensors(engine: Engine, device: str) -> None:
    x = torch.randn(1, 3, device=device)
    before, expanded = x.clone(), x.expand(4, 3)
    with engine.unchanged([expanded]):
        x.zero_()
    assert torch.equal(x, before)


# -- a capture that raises --------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


_fuse = [0]  # how many more runs the op below survives


@torch.library.custom_op("fxgraph_tests::fuse", mutates_args=())
def fuse(x: torch.Tensor) -> torch.Tensor:
    _fuse[0] -= 1
    if _fuse[0] < 0:
        raise OwnError("of the user's")
    return x.clone()


@fuse.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _raising_op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = aten.bernoulli.p(aten.add.Tensor(x, 1.0), 0.5)
    return (torch.ops.fxgraph_tests.fuse.default(kept),)


def _raising_python(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    aten.bernoulli.p(aten.add.Tensor(x, 1.0), 0.5)
    raise OwnError("of the user's")


@pytest.mark.parametrize(
    ("region", "survives", "warmup"),
    [
        pytest.param(_raising_python, 0, 2, id="python"),
        pytest.param(_raising_python, 0, 0, id="python without warm-up"),
        pytest.param(_raising_op, 0, 2, id="op in the first warm-up"),
        pytest.param(_raising_op, 1, 2, id="op in the last warm-up"),
        pytest.param(_raising_op, 2, 2, id="op in the capture"),
    ],
)
def test_after_a_capture_that_raises_the_engine_is_as_before(
    region: Callable[..., Any], survives: int, warmup: int, engine: Engine, pool: Pool, device: str
) -> None:
    x = torch.ones(1000, device=device)
    _fuse[0] = survives
    held = pool.bytes_held()
    with pytest.raises(OwnError, match="of the user's"):
        engine.capture(pool, region, [x], warmup)
    assert gc.isenabled()
    assert pool.bytes_held() == held
    _assert_usable(engine, pool, device)


@pytest.mark.parametrize(("region", "survives", "named"), [(_raising_op, 1, "fuse"), (_raising_op, 0, None)])
def test_an_error_of_an_ops_own_names_it_if_it_comes_while_capturing(
    region: Callable[..., Any], survives: int, named: str | None, engine: Engine, pool: Pool, device: str
) -> None:
    _fuse[0] = survives
    with pytest.raises(OwnError) as caught:
        engine.capture(pool, region, [torch.ones(10, device=device)], 1)
    node = engines.blamed(caught.value)
    assert (node and node.target) == (torch.ops.fxgraph_tests.fuse.default if named else None)
    assert engines.blamed(OwnError()) is None


@torch.library.custom_op("fxgraph_tests::quiet_wait", mutates_args=())
def quiet_wait(x: torch.Tensor) -> torch.Tensor:
    """An op that waits for the device and does not look at what CUDA says."""
    result = x.clone()
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    return result


@quiet_wait.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.cuda
@pytest.mark.parametrize("last", [False, True])
def test_an_op_that_ends_a_capture_without_a_word_is_named(last: bool) -> None:
    engine = engines.get("cuda")
    x = torch.ones(10, device="cuda")

    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.ops.fxgraph_tests.quiet_wait.default(aten.sin.default(x))
        return (y if last else aten.cos.default(y),)

    with pytest.raises(RuntimeError) as caught:
        engine.capture(engine.new_pool(x.device), region, [x], 1)
    node = engines.blamed(caught.value)
    assert node is not None
    assert node.target is torch.ops.fxgraph_tests.quiet_wait.default


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["item", "nonzero", "synchronize"])
def test_after_an_invalidated_capture_random_ops_and_captures_work(kind: str) -> None:
    engine = engines.get("cuda")
    pool = engine.new_pool(torch.empty(0, device="cuda").device)
    x = torch.ones(1000, device="cuda")

    # A graph, for a function would be traced first, and what invalidates a capture cannot be traced.
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    kept = graph.call_function(aten.bernoulli.p, (given, 0.5))
    if kind == "item":
        graph.call_function(aten._local_scalar_dense.default, (graph.call_function(aten.sum.default, (kept,)),))
    elif kind == "nonzero":
        graph.call_function(aten.nonzero.default, (kept,))
    else:
        graph.call_function(torch.cuda.synchronize)
    graph.output((kept,))
    region = torch.fx.GraphModule({}, graph)

    for _ in range(2):  # the second one meets what the first one left
        with pytest.raises(RuntimeError):
            engine.capture(pool, region, [x], 0)
        assert not torch.cuda.is_current_stream_capturing()
        _assert_usable(engine, pool, "cuda")


def _assert_usable(engine: Engine, pool: Pool, device: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(5, device=device)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device=device), expected)
    x = torch.ones(64, device=device)
    captured = engine.capture(pool, _mask, [x], 1)
    torch.manual_seed(4)
    wanted = values(_mask(x))
    torch.manual_seed(4)
    captured.replay()
    same(values(captured.outputs), wanted)


# -- one at a time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_collection_inside_a_capture_and_as_before_after_it(
    collecting: bool, engine: Engine, pool: Pool, device: str
) -> None:
    seen = []

    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append(gc.isenabled())
        return (aten.neg.default(x),)

    x = torch.ones(2, device=device)
    try:
        if not collecting:
            gc.disable()
        engine.capture(pool, region, [x], 2)
        after = gc.isenabled()
        with pytest.raises(OwnError):
            engine.capture(pool, _raising_python, [x], 1)
        after_failure = gc.isenabled()
    finally:
        gc.enable()
    assert seen and not any(seen)
    assert (after, after_failure) == (collecting, collecting)


def test_captures_of_two_threads_exclude_each_other(engine: Engine, device: str) -> None:
    place = torch.empty(0, device=device).device
    events: list[str] = []
    together = threading.Barrier(2)
    failures: list[BaseException] = []

    def capture(name: str) -> None:
        def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            events.append(name)
            time.sleep(0.03)  # long enough for the other thread to come in, if it can
            events.append(name)
            return (aten.neg.default(x),)

        try:
            pool = engine.new_pool(place)
            x = torch.ones(2, device=device)
            together.wait(20)
            captured = engine.capture(pool, region, [x], 2)
            captured.replay()
            same(captured.outputs[0], -x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=capture, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert {"a", "b"} == set(events)
    changes = sum(one != other for one, other in itertools.pairwise(events))
    assert changes == 1, f"the captures ran into each other: {''.join(events)}"


# -- order ------------------------------------------------------------------------------------------------------------

LONG = 20_000_000  # GPU cycles, some 10 ms: whatever is not ordered behind it overtakes it


@pytest.mark.cuda
@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after a replay on another stream"])
def test_a_replay_is_ordered_on_the_callers_stream(warm: bool) -> None:
    engine = engines.get("cuda")
    pool = engine.new_pool(torch.empty(0, device="cuda").device)
    x, w = torch.ones(1000, device="cuda"), torch.full((1000,), 2.0, device="cuda")
    captured = engine.capture(pool, affine, [x, w], 1)
    if warm:
        captured.replay()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        x.fill_(3.0)
        captured.replay()
        found = captured.outputs[0].clone()
        x.fill_(4.0)
    stream.synchronize()
    same(found, torch.full((1000,), 7.0, device="cuda"))


@pytest.mark.cuda
def test_regions_of_one_pool_do_not_overlap_in_time() -> None:
    engine = engines.get("cuda")
    pool = engine.new_pool(torch.empty(0, device="cuda").device)
    x = torch.ones(1000, device="cuda")
    first = engine.capture(pool, lambda x: (aten.neg.default(x),), [x], 1)
    second = engine.capture(pool, lambda y: (aten.mul.Tensor(y, 10.0),), [first.outputs[0]], 1)
    torch.cuda.synchronize()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(LONG)
        x.fill_(3.0)
        first.replay()
    with torch.cuda.stream(two):  # nobody tells it to wait for the first stream
        second.replay()
        found = second.outputs[0].clone()
    torch.cuda.synchronize()
    same(found, torch.full((1000,), -30.0, device="cuda"))


@pytest.mark.cuda
def test_capture_waits_for_the_callers_stream_and_is_waited_for() -> None:
    engine = engines.get("cuda")
    pool = engine.new_pool(torch.empty(0, device="cuda").device)
    x = torch.zeros(1000, device="cuda")
    seen = torch.zeros(1000, device="cuda")

    def region(x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        aten.copy_.default(seen, x)
        return (aten.neg.default(x),)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        x.fill_(5.0)
        engine.capture(pool, region, [x, seen], 1)  # its warm-up copies x into seen
        found = seen.clone()
    torch.cuda.synchronize()
    same(found, torch.full((1000,), 5.0, device="cuda"))


@pytest.mark.cuda
def test_the_device_of_the_pool_counts_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    engine = engines.get("cuda")
    pool = engine.new_pool(torch.device("cuda", 1))
    x = torch.ones(8, device="cuda:1")
    with torch.cuda.device(0):
        captured = engine.capture(pool, affine, [x, x], 1)
        x.fill_(2.0)
        captured.replay()
        assert torch.cuda.current_device() == 0
    same(captured.outputs[0], torch.full((8,), 5.0, device="cuda:1"))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_release_is_final_and_idempotent(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(3, device=device)
    captured, other = (engine.capture(pool, affine, [x, x], 1) for _ in range(2))
    captured.release()
    captured.release()
    with pytest.raises(AssertionError, match="released"):
        captured.replay()
    x.fill_(2.0)
    other.replay()
    same(other.outputs[0], torch.full((3,), 5.0, device=device))


@pytest.mark.cuda
def test_what_the_runs_before_a_capture_have_used_is_not_kept() -> None:
    engine = engines.get("cuda")
    x = torch.ones(16 << 20, device="cuda")
    pool = engine.new_pool(x.device)

    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten.sum.default(aten.exp.default(aten.sin.default(x))),)

    torch.cuda.empty_cache()
    held, reserved = pool.bytes_held(), torch.cuda.memory_reserved()
    captured = engine.capture(pool, region, [x], 2)
    own = pool.bytes_held() - held
    assert own >= 2 * x.nbytes  # its scratch
    assert torch.cuda.memory_reserved() - reserved <= own + x.nbytes // 2
    captured.release()


def test_memory_goes_back_when_the_region_is_released_and_no_tensor_holds_it(
    engine: Engine, pool: Pool, device: str
) -> None:
    def grow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = aten.expand.default(x, [1000, 4096])
        return (aten.add.Tensor(wide, 1.0),)

    before = pool.bytes_held()
    captured = engine.capture(pool, grow, [torch.ones(4096, device=device)], 1)
    assert pool.bytes_held() >= before + 1000 * 4096 * 4
    captured.release()
    del captured
    assert pool.bytes_held() == before


def test_an_output_outlives_its_region_where_somebody_holds_it(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.full((1000,), 2.0, device=device)
    captured = engine.capture(pool, affine, [x, x], 1)
    captured.replay()
    mine = captured.outputs[0].detach()
    captured.release()
    del captured
    x.fill_(9.0)
    later = engine.capture(pool, affine, [x, x], 1)
    later.replay()
    same(mine, torch.full((1000,), 5.0, device=device))


def test_bytes_held_counts_memory_once_where_outputs_share_it(engine: Engine, device: str) -> None:
    place = torch.empty(0, device=device).device

    def held(region: Callable[..., Any]) -> int:
        pool = engine.new_pool(place)
        before = pool.bytes_held()
        captured = engine.capture(pool, region, [torch.ones(1 << 20, device=device)], 0)
        assert captured.outputs
        return pool.bytes_held() - before

    def one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten.neg.default(x),)

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        negative = aten.neg.default(x)
        return negative, aten.view.default(negative, [1 << 10, 1 << 10]), aten.slice.Tensor(negative, 0, 5, 9)

    assert held(one) == held(views) > 0


def test_a_pool_made_of_a_handle_has_that_handle(engine: Engine, pool: Pool, device: str) -> None:
    x = torch.ones(3, device=device)
    shared = engine.new_pool(x.device, pool.handle)
    assert shared.handle == pool.handle
    one, two = engine.capture(pool, affine, [x, x], 1), engine.capture(shared, affine, [x, x], 1)
    for region in (one, two, one):
        x.add_(1.0)
        region.replay()
        same(region.outputs[0], x * x + 1)


@pytest.mark.parametrize(
    "like",
    [
        lambda: torch.empty(2, 3),
        lambda: torch.empty(3, 2, dtype=torch.int64).t(),
        lambda: torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.empty(3, 1).expand(3, 5),
        lambda: torch.empty(0, 3, dtype=torch.bool),
        lambda: torch.empty((), dtype=torch.complex64),
    ],
    ids=["contiguous", "transposed", "channels last", "expanded", "empty", "scalar"],
)
def test_a_static_buffer_looks_like_its_model_and_is_new_memory(
    like: Callable[[], torch.Tensor], engine: Engine, pool: Pool, device: str
) -> None:
    model = like().to(device)
    buffer = engine.empty(pool, model)
    assert (buffer.shape, buffer.stride(), buffer.dtype) == (model.shape, model.stride(), model.dtype)
    assert buffer.device == model.device
    assert not buffer.numel() or buffer.data_ptr() != model.data_ptr()


# -- poison -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[type(engine).__module__], "POISON", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.usefixtures("poisoning")
def test_poison_of_a_float_is_nan(dtype: torch.dtype, engine: Engine, device: str) -> None:
    x = torch.ones(4, dtype=dtype, device=device)
    engine.poison([x])
    assert x.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.usefixtures("poisoning")
def test_poison_of_what_has_no_nan_is_another_value(dtype: torch.dtype, engine: Engine, device: str) -> None:
    x = torch.zeros(4, dtype=dtype, device=device)
    engine.poison([x])
    assert (x != 0).all()


@pytest.mark.usefixtures("poisoning")
def test_poison_leaves_autograd_and_overlapping_memory_alone(engine: Engine, device: str) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    wide = torch.ones(3, 1, device=device).expand(3, 4)
    engine.poison([leaf, wide])
    assert leaf.isnan().all() and leaf.is_leaf and leaf.requires_grad


def test_without_the_switch_nothing_is_poisoned(engine: Engine, device: str) -> None:
    x = torch.ones(4, device=device)
    engine.poison([x])
    same(x, torch.ones(4, device=device))


# -- which engine -----------------------------------------------------------------------------------------------------


def test_the_tensors_choose_the_engine(device: str) -> None:
    assert engines.for_tensors([torch.ones(1, device=device)]).name == device
    assert engines.name_for("auto", [torch.device("cpu"), torch.device("cuda", 3)]) == "cuda"
    with pytest.raises(fxgraph.OptionError, match="engine-device"):
        engines.name_for("cpu", [torch.device("cuda", 0)])
    assert engines.get(device) is engines.get(device)


def test_a_pool_of_another_engine_is_an_error(engine: Engine, device: str) -> None:
    class Foreign(Pool):
        handle = None  # type: ignore[assignment]

        def bytes_held(self) -> int:
            return 0

        def trim(self) -> None: ...

    x = torch.ones(2, device=device)
    with pytest.raises(AssertionError, match="pool of another engine"):
        engine.capture(Foreign(), affine, [x, x], 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_whose_out_form_is_another_op(reduction: str, weighted: bool, device: str) -> None:
    engine = engines.get(device)
    x, t = torch.rand(3, 2, device=device), torch.rand(3, 2, device=device)
    weight = [torch.rand(3, 2, device=device)] * weighted

    def loss(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.binary_cross_entropy(*inputs, reduction=reduction),)

    region = engine.capture(engine.new_pool(x.device), loss, [x, t, *weight], 0)
    for _ in range(2):
        x.uniform_(0.1, 0.9)
        region.replay()
        torch.testing.assert_close(region.outputs, loss(x, t, *weight), rtol=0, atol=0)
