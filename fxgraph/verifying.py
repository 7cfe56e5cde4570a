"""``verify=n``: the first n replays of a capture are also run eagerly, on copies, and compared.

Three programs should give the same: the torch-level graph (what eager runs), the aten graph that was traced from it,
and the captured region. Where a replay differs from eager, the aten graph is run op by op on the same values. If some
value that the region has kept differs from it, the capture is to blame and the first such op is named; else the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.facts import output_args, where_of

from ._torch_compat.autograd import kernels_only
from .errors import VerifyError
from .replay import Call, Runner, copy_of, node_outputs, run
from .slots import Capture, Slot
from .trace import first_line, for_eager


def verified(program: Runner, capture: Capture, slot: Slot, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """:func:`fxgraph.replay.run`, compared with eager; the node's backward will be compared too.

    Raises:
        VerifyError: at the first difference, naming the op. Inputs that the program changes have been changed by then.
    """
    twin = Twin(capture, inputs)
    outputs = run(program, capture, slot, inputs, twin)
    twin.check_forward(slot, inputs, outputs)
    return outputs


class Twin:
    """A call's inputs as they were before it, and what eager makes of them."""

    def __init__(self, capture: Capture, inputs: tuple[torch.Tensor, ...]) -> None:
        self.capture = capture
        self._times = _OTHER_KERNELS if capture.plan.joint.for_inductor else 1.0
        self._values = [copy_of(tensor.detach()) for tensor in inputs]
        self._random_state = capture.engine.random_state(capture.device)
        written = {index for index, _ in capture.plan.updates}
        self._bases: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        for i, (tensor, value) in enumerate(zip(inputs, self._values, strict=True)):
            base = copy_of(value).requires_grad_(tensor.requires_grad)
            self._bases.append(base)
            # A leaf stays one, for autocast keeps its casts. What is changed in place must be neither one nor its view.
            if tensor.requires_grad and i in written:
                self.inputs.append(base.clone())
            else:
                self.inputs.append(base if tensor.is_leaf or not tensor.requires_grad else base.view_as(base))
        self.outputs: tuple[Any, ...] = ()

    def check_forward(self, slot: Slot, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> None:
        """Compare what a replay gave and changed."""
        engine, device = self.capture.engine, self.capture.device
        # The user's own hooks for saved tensors (a checkpoint's, say) must not meet those of this second call.
        plainly = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
        with plainly, engine.from_random_state(device, self._random_state):
            self.outputs = tuple(for_eager(self.capture.graph)(*self.inputs))
            drawn = engine.random_state(device)
        problem = next(self._differences(inputs, outputs), None)
        if problem is None and not torch.equal(drawn, engine.random_state(device)):
            problem = "other random numbers were drawn"
        if problem is not None:
            raise VerifyError(
                "verify-forward",
                "the replay of a forward differs from eager",
                where=self._first_op(slot),
                observed=problem,
                expected="what the callable gives when it runs eagerly on copies of the inputs",
                hint=_HINT,
            )

    def _differences(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> Iterator[str]:
        for k, (found, expected) in enumerate(zip(outputs, self.outputs, strict=True)):
            if isinstance(expected, torch.Tensor):
                yield from difference(f"output {k}", found, expected, self._times)
            elif found != expected:
                yield f"output {k} is {found!r}, expected {expected!r}"
        plan = self.capture.plan
        for i in sorted({*plan.mutated, *[index for index, _ in plan.updates]}):
            what = f"what is left in the {plan.inputs[i]}"
            yield from difference(what, inputs[i], self.inputs[i], self._times)

    def check_gradients(
        self,
        call: Call,
        tangents: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        wanted: Iterable[int],
        added_to: Mapping[int, torch.Tensor | None],
    ) -> None:
        """Compare what a replay of the backward gave for the ``wanted`` ones of the plan's gradients.

        Where a region has accumulated a gradient, ``gradients`` has what ``.grad`` is then, ``added_to`` what it was.
        """
        plan = self.capture.plan
        pairs = [
            (output, tangents[k])
            for k, output in node_outputs(plan, self.outputs, self.inputs).items()
            if tangents[k] is not None and output.requires_grad
        ]
        expected = torch.autograd.grad(
            [output for output, _ in pairs],
            [self._bases[i] for i in plan.gradient_of],
            [tangent for _, tangent in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for k in wanted:
            found, its, name = gradients[k], expected[k], f"the gradient of the {plan.inputs[plan.gradient_of[k]]}"
            former = added_to.get(k)
            if former is not None:
                its = former if its is None else former + its
            problem: str | None = None
            if found is not None and its is not None:
                problem = next(difference(name, found, its, self._times), None)
            elif found is not its:
                problem = f"{name} is {'None' if found is None else 'a tensor'}, in eager it is not"
            if problem is not None:
                raise VerifyError(
                    "verify-backward",
                    "the replay of a backward differs from eager",
                    where=self._first_op_of_backward(
                        call, tangents, [None if added_to.get(i) is not None else g for i, g in enumerate(gradients)]
                    ),
                    observed=problem,
                    expected="the gradients that autograd gives for the eager call on copies of the inputs",
                    hint=_HINT,
                )

    def _first_op(self, slot: Slot) -> str:
        plan, engine = self.capture.plan, self.capture.engine
        values = [copy_of(value) for value in self._values]
        with kernels_only(), engine.from_random_state(self.capture.device, self._random_state):
            return _first_difference(plan.forward, values, slot.outputs, self._times)

    def _first_op_of_backward(
        self, call: Call, tangents: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> str:
        plan = self.capture.plan
        defined = [tangent for k in plan.tangents if (tangent := tangents[k]) is not None]
        if plan.backward is None or len(defined) < len(plan.tangents):
            return "a backward of some of the outputs"
        given = [*call.slot.backward_inputs()[: -len(defined)], *defined]
        with kernels_only():
            return _first_difference(plan.backward, [copy_of(tensor) for tensor in given], gradients, self._times)


_HINT = "this is a fault of fxgraph: please report it with the callable; fxgraph.ungraph(callable) runs eagerly"


class _Watcher(fx.Interpreter):
    """Runs a region op by op and stops at the first node whose value is not the one that a replay has left."""

    def __init__(self, region: fx.GraphModule, found: Sequence[torch.Tensor | None], times: float) -> None:
        super().__init__(region)
        self._times = times
        self._found = {
            node: value for node, value in zip(output_args(region), found, strict=True) if isinstance(node, fx.Node)
        }

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        found = self._found.get(n)
        if isinstance(value, torch.Tensor) and found is not None:
            problem = next(difference(n.name, found, value, self._times), None)
            if problem is not None:
                raise _Stop(f"op {n.target} ({where_of(n)}): {problem}")
        return value


class _Stop(Exception):
    """The first difference."""


def _first_difference(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None], times: float
) -> str:
    try:
        _Watcher(region, found, times).run(*inputs)
    except _Stop as stop:
        return str(stop)
    return "the trace: its graph, run op by op, gives what the replay gives"


def difference(name: str, found: Any, expected: torch.Tensor, times: float = 1.0) -> Iterator[str]:
    """In words, how two tensors differ by more than rounding; nothing if they do not.

    Allowed are the tolerances of ``torch.testing.assert_close`` for the dtype, but of the largest element: kernels that
    add in no fixed order (atomics) round with the terms of a sum, not with the sum. ``times`` as much is allowed where
    other kernels than eager's run.
    """
    if not isinstance(found, torch.Tensor):
        yield f"{name} is {type(found).__name__}, expected a tensor"
        return
    one, other = found.detach(), expected.detach()
    rtol = atol = 0.0
    if other.dtype.is_floating_point or other.dtype.is_complex:
        finite = other[other.isfinite()].abs()
        rtol = times * _ROUNDING.get(other.dtype, 1e-3)
        atol = max(times * 1e-7, rtol * float(finite.max()) if finite.numel() else 0.0)
    try:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        yield f"{name}: {first_line(error)} {_rest(str(error))}".strip()
        return
    if one.requires_grad != other.requires_grad or found.requires_grad != expected.requires_grad:
        yield f"{name} has requires_grad={found.requires_grad}, expected {expected.requires_grad}"


_ROUNDING = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1.3e-6,
    torch.complex64: 1.3e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
}
"""``torch.testing.assert_close``'s relative tolerances."""

_OTHER_KERNELS = 10.0
"""Inductor's kernels fuse, keep lower precision in float32 in between, and recompute: every op may round otherwise."""


def _rest(text: str) -> str:
    return " ".join(line for line in text.splitlines()[1:] if "difference" in line or "Mismatched" in line)
