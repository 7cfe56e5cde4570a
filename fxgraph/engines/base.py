"""What an engine promises. One contract test-suite (``tests/test_engine_contract.py``) runs on every engine present.

An engine turns a *region* (a function of tensors that runs aten ops and returns a flat tuple of tensors) into something
that can be replayed without running the function again:

* **Fixed addresses.** A captured region reads its inputs and writes its outputs at the addresses they had at capture.
  Replay takes no arguments: whoever replays has filled the inputs before.
* **Overwriting.** Every replay overwrites the outputs of the one before. Keeping that from a user is the business of
  the callers, not of the engine.
* **Aliases stay.** An output that shares memory with an input or with another output at capture shares it at each
  replay.
* **No Python of the user's** runs in a replay, and no autograd.
* **Randomness.** A replay draws from the default generator of its device, as many numbers as running the function
  would, and leaves it where running the function would.
* **Order.** A replay comes after everything the caller's current stream has been given, and before everything that it
  is given later. Regions of one pool never overlap in time.
* **Capture** may run the function; it runs it ``warmup`` times more before. Side effects of those runs on the inputs
  and on random generators are the caller's to undo (:meth:`Engine.unchanged`). After a capture that raises, the engine
  is as before: no stream captures, no memory is held, random ops work.
* **One at a time.** Captures of all engines and threads exclude each other, and the garbage collector does not run
  inside.
* **Release** is final and idempotent; memory goes back when no tensor holds it any more.
"""

from __future__ import annotations

import abc
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch_compat.autograd import preserve_versions
from .._torch_compat.tracing import LOCK, tracing

Region = Callable[..., "tuple[torch.Tensor, ...]"]


class Pool(abc.ABC):
    """Memory shared by the regions captured into it; see :meth:`Engine.new_pool`."""

    @property
    @abc.abstractmethod
    def handle(self) -> object:
        """What another capture API of torch takes as its ``pool`` argument."""

    @abc.abstractmethod
    def bytes_held(self) -> int:
        """Bytes that the pool's regions hold now."""

    @abc.abstractmethod
    def trim(self) -> None:
        """Give back to the device what no region and no tensor holds any more."""


class CapturedRegion(abc.ABC):
    """A region that can be replayed. ``outputs`` are its buffers, in the order in which the function returned them."""

    outputs: tuple[torch.Tensor, ...]

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the region once more on whatever its inputs hold now."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give up the region; replaying it afterwards is an error."""


class Engine(abc.ABC):
    """See the module's text for the contract."""

    name: str

    @abc.abstractmethod
    def new_pool(self, device: torch.device, handle: object = None) -> Pool:
        """A pool on a device, or one that shares the memory behind ``handle``."""

    @abc.abstractmethod
    def empty(self, pool: Pool, like: torch.Tensor) -> torch.Tensor:
        """A static buffer with the size, strides and dtype of ``like`` (expanded dimensions stay expanded)."""

    @abc.abstractmethod
    def capture(self, pool: Pool, region: Region, inputs: Sequence[torch.Tensor], warmup: int) -> CapturedRegion:
        """Capture a region on these inputs.

        Raises:
            Exception: whatever the region or the device raises, after everything has been put back.
        """

    @property
    @abc.abstractmethod
    def poisons(self) -> bool:
        """Whether :meth:`poison` does anything: a debug switch, which tests set."""

    @abc.abstractmethod
    def poison(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill buffers with values that no computation gives, to make a read of a given-back buffer visible in
        tests."""

    @contextlib.contextmanager
    def unchanged(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """On leaving, the tensors' memory, values and version counters and all random generators are what they were."""
        lay = [tensor.detach() for tensor in tensors]
        kept = [compact(tensor).clone() for tensor in lay]
        rng = torch.get_rng_state()
        device_rng = self._device_rng()
        try:
            with preserve_versions(tensors):
                yield
        finally:
            with torch.no_grad(), preserve_versions(tensors):
                for tensor, memory, value in zip(tensors, lay, kept, strict=True):
                    if _place(tensor) != _place(memory):  # `buffer.data = ...`
                        tensor.data = memory
                    compact(memory).copy_(value)
            torch.set_rng_state(rng)
            self._set_device_rng(device_rng)

    def after(self, device: torch.device, last: object) -> object:
        """What the caller's current stream is given from now on comes after what it, or another one, was given before.

        Args:
            device: whose streams.
            last: what this method gave when it was called before, None if it was not.
        """
        return None

    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default generator from which a region on this device draws."""
        return torch.get_rng_state()

    @contextlib.contextmanager
    def from_random_state(self, device: torch.device, state: torch.Tensor) -> Iterator[None]:
        """Ops inside draw from that state on; on leaving, the generator is as it was."""
        before = self.random_state(device)
        self._set_random_state(device, state)
        try:
            yield
        finally:
            self._set_random_state(device, before)

    def _set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def _device_rng(self) -> list[torch.Tensor]:
        return []

    def _set_device_rng(self, states: list[torch.Tensor]) -> None:
        del states


@contextlib.contextmanager
def blaming(node: fx.Node) -> Iterator[None]:
    """What is raised inside while capturing is the op's own: it cannot be captured. (Running out of memory is not.)"""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the op raises; it goes on
        blame(error, node)
        raise


def blame(error: BaseException, node: fx.Node | None) -> None:
    """Note on an error which op of a region it comes from, where that is known."""
    setattr(error, _BLAMED, node)


def blamed(error: BaseException | None) -> fx.Node | None:
    """The op of a region whose own error this is; None for an error of the engine's, or of the device's."""
    node: fx.Node | None = getattr(error, _BLAMED, None)
    return node


_BLAMED = "_fxgraph_blamed"


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """One capture at a time in this process, without garbage collection (a collected graph would end the capture)."""
    with LOCK:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def aten_graph(region: Region, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The region as a graph of aten ops; one that is no ``GraphModule`` yet is traced on these inputs."""
    if isinstance(region, fx.GraphModule):
        return region
    with tracing():
        graph: fx.GraphModule = make_fx(region, tracing_mode="fake")(*inputs)
        return graph


def empty_like_layout(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor of this size and strides; stride-0 dimensions share it."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.size(), tensor.stride()


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its expanded dimensions narrowed to one element: all of its memory, each element once."""
    if 0 not in tensor.stride():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copy_laid_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; it has a history where grad mode is on."""
    return value.new_empty_strided(value.size(), strides).copy_(value)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in few launches where there are several. Grad mode is off."""
    if len(targets) > 1:
        torch._foreach_copy_(targets, sources)
    elif targets:
        targets[0].copy_(sources[0])


def poison_value(dtype: torch.dtype) -> float | bool | int:
    """NaN where the dtype has one, else an unlikely number."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max // 2
