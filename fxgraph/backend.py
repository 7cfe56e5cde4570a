"""The ``torch.compile`` backend ``graphed``, and capture in parts by Dynamo's graph breaks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo
from torch import fx

from passes.facts import ops_of

from . import fallback, stages, trace
from ._torch_compat import dynamo, dynamo_faults, dynamo_guards
from .errors import OptionError
from .options import Options
from .program import Pools


def graphed(
    graph: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """Backend for ``torch.compile(model, backend="graphed", options={...})``.

    Args:
        graph: the torch-level graph that Dynamo found.
        example_inputs: not used: regions are captured at the first call, on real inputs.
        options: see :class:`fxgraph.Options`.
        mode: not supported; ``torch.compile`` passes it on.
    Raises:
        OptionError: for an unknown option, listing the allowed ones.
    """
    del example_inputs
    if mode is not None:
        raise OptionError(
            "bad-option",
            "the backend 'graphed' has no modes",
            where="torch.compile(mode=...)",
            observed=repr(mode),
            expected="no mode",
            hint="say what you want with options={...}: " + ", ".join(f.name for f in dataclasses.fields(Options)),
        )
    chosen = Options.of(options)
    if chosen.on_new_signature != "capture":
        raise OptionError(
            "bad-option",
            "torch.compile itself decides what happens to a call with a new signature",
            where="options={'on_new_signature': ...}",
            observed=repr(chosen.on_new_signature),
            expected="'capture', the default",
            hint="use torch.compile(dynamic=..., fullgraph=...) and torch._dynamo.config.recompile_limit, or "
            "fxgraph.make_graphed_callables",
        )
    return compile_graph(graph, chosen, Pools(), "a torch.compile graph")


def compile_graph(
    graph: fx.GraphModule, options: Options, pools: Pools, name: str, ints_vary: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """A callable with the graph's flat inputs and outputs that captures and replays it.

    ``ints_vary``: see :meth:`fxgraph.stages.Judged.of`.
    """
    dynamo.demand_all_guards()
    dynamo_guards.tighten_guards(graph)
    try:
        dynamo_faults.refuse_miscompiled(graph)
    except dynamo_faults.Miscompiled as error:
        fallback.warn(f"{name} runs eagerly: it has {error}")
        raise dynamo.SkipFrame(str(error)) from error
    specs = [trace.spec_of(source) for source in dynamo.source_names(graph)]
    program = stages.build(stages.Judged.of(graph, options, ints_vary), specs, options, name, pools)

    def run(*inputs: Any) -> tuple[Any, ...]:
        dynamo.release_guards()
        return program(*inputs)

    disabled: Callable[..., tuple[Any, ...]] = torch._dynamo.disable(run)
    return disabled


def split_callable(function: Callable[..., Any], options: Options, pools: Pools, name: str) -> Callable[..., Any]:
    """The callable with everything captured that Dynamo finds between pieces of Python that no graph can hold."""
    compiler = functools.partial(_compile_part, options=options, pools=pools, name=f"a part of {name}")
    return torch.compile(function, backend=compiler, dynamic=False)


def _compile_part(
    graph: fx.GraphModule, example_inputs: list[Any], *, options: Options, pools: Pools, name: str
) -> Callable[..., tuple[Any, ...]]:
    del example_inputs
    if len(ops_of(graph)) < options.min_region_ops:
        dynamo_guards.tighten_guards(graph)
        return trace.for_eager(graph)
    # What Python computes before the break may come from data; Dynamo makes inputs of the numbers that have changed.
    return compile_graph(graph, options, pools, name, ints_vary=True)
