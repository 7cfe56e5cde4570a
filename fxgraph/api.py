"""``make_graphed_callables`` and its companions: argument handling only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

import passes

from .errors import ContractError, OptionError
from .graphed import GraphedCallable, original_of
from .options import Options
from .program import Pools
from .sharing import Plans


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Any:
    """Graphed versions of functions or modules: each call replays captured regions from inside one autograd node.

    A stand-in for ``torch.cuda.make_graphed_callables`` with the same positional arguments. A module comes back as the
    same object, with its ``forward`` replaced; a function comes back as a callable with the same signature.

    Args:
        callables: a function or ``nn.Module``, or a tuple of them. The callables of a tuple share one memory pool. Any
            order of calls is right; the order in the tuple is the one for which memory is laid out.
        sample_args: positional arguments to capture for: a tuple, or for a tuple of callables a tuple of tuples.
            Tensors may be nested in containers; anything else is a constant of the capture.
        num_warmup_iters: how often each region runs before it is captured, on CUDA once at least. Leaves no trace.
        allow_unused_input: whether an input or parameter that requires grad may have no gradient.
        pool: a pool handle (``torch.cuda.graph_pool_handle()``) or a graph's ``pool()``, to share its memory.
        sample_kwargs: keyword arguments to capture for: a dict, or a tuple of dicts for a tuple of callables.
        options: :class:`fxgraph.Options` or a dict with its field names.
    Returns:
        What was given, graphed.
    Raises:
        OptionError: an argument of this function itself is wrong.
        ContractError: the callables or the samples break the contract; all violations are named.
        TraceError, UncapturableError, CaptureError: see :mod:`fxgraph.errors`. Nothing has changed then.
        Exception: what a callable itself raises on its sample, with a note.
    """
    if not isinstance(num_warmup_iters, int) or isinstance(num_warmup_iters, bool) or num_warmup_iters < 0:
        raise OptionError(
            "bad-option",
            "num_warmup_iters is not a count",
            where="num_warmup_iters",
            observed=repr(num_warmup_iters),
            expected="an int >= 0",
        )
    chosen = Options.of(options, **({} if num_warmup_iters == 3 else {"num_warmup_iters": num_warmup_iters}))
    several = isinstance(callables, tuple)
    targets = callables if several else (callables,)
    all_args = _per_callable(sample_args, several, len(targets), "sample_args", tuple)
    all_kwargs = _per_callable(
        {} if sample_kwargs is None else sample_kwargs, several, len(targets), "sample_kwargs", dict
    )
    names = [f"callables[{i}]" if several else _name_of(target) for i, target in enumerate(targets)]

    report = passes.Report(())
    for target, args, kwargs, name in zip(targets, all_args, all_kwargs, names, strict=True):
        report += passes.judge(passes.CallSite(target, args, kwargs, name if several else ""), passes.CONTRACT)
    if not report.ok:
        raise ContractError.from_report(report)

    pools = Pools(pool)
    graphed = [
        GraphedCallable(original_of(target), chosen, pools, name, allow_unused_input)
        for target, name in zip(targets, names, strict=True)
    ]
    pools.plans = Plans()
    try:
        finish = [g.capture(args, kwargs) for g, args, kwargs in zip(graphed, all_args, all_kwargs, strict=True)]
        for capture_backward in reversed(finish):
            capture_backward()
    except BaseException:
        for g in graphed:
            g.release()
        raise
    finally:
        pools.plans = None
    result = tuple(_install(target, g) for target, g in zip(targets, graphed, strict=True))
    return result if several else result[0]


def ungraph(graphed: Any) -> Any:
    """The original of a graphed function, or the module with its own ``forward`` back. Anything else comes back as it
    is."""
    if isinstance(graphed, torch.nn.Module):
        current = graphed.__dict__.get("forward")
        if isinstance(current, GraphedCallable):
            del graphed.__dict__["forward"]
            if current.original != graphed.forward:
                graphed.__dict__["forward"] = current.original
        return graphed
    return graphed.original if isinstance(graphed, GraphedCallable) else graphed


def _install(target: Any, graphed: GraphedCallable) -> Any:
    is_module = isinstance(target, torch.nn.Module)
    if is_module:
        target.forward = graphed
    graphed.in_place()
    return target if is_module else graphed


def _name_of(target: Any) -> str:
    if isinstance(target, torch.nn.Module):
        return type(target).__name__
    target = target.func if isinstance(target, functools.partial) else target
    return getattr(target, "__name__", type(target).__name__)


def _per_callable(given: Any, several: bool, count: int, name: str, kind: type) -> tuple[Any, ...]:
    """One value per callable."""
    values = given if several else (given,)
    if not several and kind is tuple and isinstance(given, torch.Tensor):
        values = ((given,),)  # torch's API takes a bare tensor for a callable with one argument
    if several and kind is dict and given == {}:
        values = ({},) * count
    if not isinstance(values, tuple) or len(values) != count or not all(isinstance(value, kind) for value in values):
        shape = f"a tuple of {count} {kind.__name__}s, one per callable" if several else f"a {kind.__name__}"
        raise OptionError(
            "sample-count",
            f"{name} does not fit the callables",
            where=name,
            observed=type(given).__name__ + (f" of length {len(given)}" if isinstance(given, (tuple, list)) else ""),
            expected=shape,
            hint="positional arguments of each callable in a tuple, keyword arguments in a dict",
        )
    return tuple(values)
