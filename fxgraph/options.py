"""The one set of options, the same for both entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from passes import AnyPass, Pass
from passes.pipeline import passes_of
from passes.verify import AtenLevel

from .errors import OptionError


@dataclasses.dataclass(frozen=True)
class Options:
    """How fxgraph captures and replays. Give it, or a dict with its field names, as ``options=``.

    Fields:
        engine: who captures and replays; ``auto`` takes ``cuda`` for callables with CUDA tensors, else ``cpu``.
        kernels: ``aten`` runs the kernels that eager would run, bit by bit the same; ``inductor`` has torch's compiler
            make fused ones, which are captured: equal to eager up to rounding, with the same random numbers. What it
            cannot compile runs with aten kernels, with one warning.
        grads: ``autograd`` makes parameters inputs of the autograd node, so that all of autograd works. ``in_graph``
            has the captured backward itself write ``.grad`` or add to it, which is much cheaper with many parameters;
            Note [Gradients in the graph] in ``accumulate.py`` says what it does not do.
        on_new_signature: what a call does whose signature matches no capture.
        max_captures: captures kept per traced callable and set of parameters; past it the least recently used goes.
        max_in_flight: forwards that may be outstanding before their backward; past it, eager with one warning.
        on_uncapturable: what happens to a callable with a part that no CUDA graph can hold. ``split`` captures what is
            around it, ``eager`` runs the callable eagerly, ``error`` raises :class:`~fxgraph.errors.UncapturableError`.
        min_region_ops: where a callable is captured in parts, a part of fewer ops runs eagerly.
        passes: rewrites of the callable's torch-level graph, run in this order before forward and backward are made of
            it: passes of :mod:`passes`, ``torch.fx`` passes (``PassBase``), functions of a ``GraphModule``. They must
            keep its inputs and outputs; nodes that they make need no fake values. The rules judge what they leave, and
            what they change, runs that way eagerly too. Passes on ATen operators are refused: below autograd there is
            no ``detach`` and no ``no_grad``.
        num_warmup_iters: how often a region runs before it is captured; on CUDA once at least.
        verify: how many first replays of each capture are also run eagerly, on copies, and compared, forward and
            backward; a difference raises :class:`~fxgraph.errors.VerifyError`, which names the first op that differs.
    Raises:
        OptionError: for a value that is not allowed; it lists the allowed ones.
    """

    engine: Literal["auto", "cuda", "cpu"] = "auto"
    kernels: Literal["aten", "inductor"] = "aten"
    grads: Literal["autograd", "in_graph"] = "autograd"
    on_new_signature: Literal["capture", "eager", "error"] = "capture"
    max_captures: int = 8
    max_in_flight: int = 2
    on_uncapturable: Literal["split", "eager", "error"] = "split"
    min_region_ops: int = 2
    passes: tuple[AnyPass, ...] = ()
    num_warmup_iters: int = 3
    verify: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name])
            if field.name == "passes":
                object.__setattr__(self, "passes", _passes(value))
            elif allowed:
                if value not in allowed:
                    raise _bad_value(field.name, value, "one of " + ", ".join(map(repr, allowed)))
            elif not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[field.name]:
                raise _bad_value(field.name, value, f"an int >= {_LEAST[field.name]}")

    @classmethod
    def of(cls, options: Options | Mapping[str, Any] | None, **overrides: Any) -> Options:
        """Options from whatever the user gave.

        Raises:
            OptionError: for an unknown name (it lists the allowed ones) or a bad value.
        """
        if options is None:
            return cls(**overrides)
        if isinstance(options, cls):
            return dataclasses.replace(options, **overrides)
        if not isinstance(options, Mapping):
            raise OptionError(
                "bad-option",
                "options are neither fxgraph.Options nor a mapping",
                where="options=",
                observed=f"{type(options).__name__} {options!r}",
                expected="fxgraph.Options(...) or a dict with its field names",
            )
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise OptionError(
                "unknown-option",
                "unknown option" + ("s" if len(unknown) > 1 else ""),
                where="options=",
                observed=", ".join(map(repr, unknown)),
                expected="names among " + ", ".join(names),
            )
        return cls(**{**options, **overrides})


_LEAST = {"max_captures": 1, "max_in_flight": 1, "min_region_ops": 1, "num_warmup_iters": 0, "verify": 0}


def _passes(value: object) -> tuple[AnyPass, ...]:
    if not isinstance(value, (list, tuple)):
        raise _bad_value("passes", value, "a list of passes: each takes a torch.fx.GraphModule")
    try:
        chosen = passes_of(value)
    except TypeError as error:
        raise _bad_value("passes", value, f"a list of passes: each takes a torch.fx.GraphModule; {error}") from error
    for one in chosen:
        if isinstance(one, Pass) and any(isinstance(rule, AtenLevel) for rule in (*one.requires, *one.ensures)):
            raise OptionError(
                "bad-option",
                "a pass on ATen operators in the options",
                where="options={'passes': ...}",
                observed=one.name,
                expected="passes of the torch-level graph, of which forward and backward are made afterwards",
                hint="rewrite the calls that the callable itself makes (torch.relu, Tensor.add, ...), in a function of "
                "a torch.fx.GraphModule; what happens below autograd fxgraph optimises itself",
            )
    return chosen


def _bad_value(name: str, value: object, expected: str) -> OptionError:
    return OptionError(
        "bad-option",
        "option with a value that is not allowed",
        where=f"options={{{name!r}: ...}}",
        observed=repr(value),
        expected=expected,
    )
