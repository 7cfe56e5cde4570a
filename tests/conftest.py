"""What every test gets: a device, seeds, a Hypothesis profile, and a check that it left torch's global state alone."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

SEED = 20260

# -- Hypothesis -------------------------------------------------------------------------------------------------------
# "ci": the same examples in every run, so that a red run is about the change. "soak": new ones in every run, many.

settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("FXGRAPH_HYPOTHESIS_PROFILE", "ci"))


class _TorchRandom:
    """torch's default generators, in the shape that Hypothesis seeds before each example and puts back after it."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def setstate(self, state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
        cpu, cuda = state
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


_torch_random = _TorchRandom()  # Hypothesis keeps a weak reference only
register_random(_torch_random)

# -- devices ----------------------------------------------------------------------------------------------------------

DEVICES = [
    pytest.param("cpu", id="cpu"),
    *([pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []),
]


@pytest.fixture(params=DEVICES, scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device there is. Of session scope, so that a Hypothesis test may use it."""
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker its share of the cores: torch would start as many threads as there are cores in each."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# -- global state -----------------------------------------------------------------------------------------------------
# One row per switch that code under test could leave changed: how to read it and how to put it back.


def _set_autocast(device: str) -> Callable[[tuple[bool, torch.dtype]], None]:
    def put_back(state: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, state[0])
        torch.set_autocast_dtype(device, state[1])

    return put_back


def _get_autocast(device: str) -> Callable[[], tuple[bool, torch.dtype]]:
    return lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def _get_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, lambda _: torch.set_default_device(None)),
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "deterministic algorithms": (
        _get_deterministic,
        lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
    ),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast on cpu": (_get_autocast("cpu"), _set_autocast("cpu")),
    "autocast on cuda": (_get_autocast("cuda"), _set_autocast("cuda")),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
}


def _read_switches() -> dict[str, Any]:
    state = {name: get() for name, (get, _) in _SWITCHES.items()}
    # Read only: there is nothing to set back for these, a stream or a mode that is left on is left on.
    state["inference mode"] = torch.is_inference_mode_enabled()
    state["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    state["function modes"] = torch._C._len_torch_function_stack()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["CUDA device"] = torch.cuda.current_device()
        state["CUDA stream"] = torch.cuda.current_stream()
        state["CUDA capture under way"] = torch.cuda.is_current_stream_capturing()
    return state


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    """Seed every generator that a test may draw from."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _own_counts() -> None:
    """Let ``fxgraph.stats()`` count what the test makes: what others have left in cycles goes at some time later."""
    for module in map(sys.modules.get, ("fxgraph.program", "fxgraph.graphed")):
        if module is not None:
            module.ALIVE.clear()


@pytest.fixture(autouse=True)
def _global_state_unchanged() -> Iterator[None]:
    """Fail a test that leaves torch's global state changed, put it back, and forget what Dynamo compiled in it."""
    before = _read_switches()
    yield
    after = _read_switches()
    changed = [name for name in before if before[name] != after[name]]
    for name in changed:
        if name in _SWITCHES:
            _SWITCHES[name][1](before[name])
    if "torch._dynamo.convert_frame" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    left = "; ".join(f"{name}: {before[name]!r} before, {after[name]!r} after" for name in changed)
    assert not changed, f"the test left global state changed: {left}"
