"""Switches of modes in a torch-level graph: grad mode, autocast, inference mode, the backends of attention.

Dynamo leaves ``with torch.autocast(...)`` in a graph as an op that enters and one that exits. A graph that is cut
between the two would leave the mode on, and what follows would run without it. So before a graph is cut the switches
are taken out, each op is told in which modes it runs, and each part gets switches of its own around its ops. Then an op
can also move across a switch.

And an op that raises would leave on what is on: in Python a ``with`` ends there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.nn import attention

_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXITS: dict[Any, Any] = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    _ENTER_INFERENCE: torch.autograd.grad_mode._exit_inference_mode,
}
_SET_GRAD: Any = torch._C._set_grad_enabled
_SET_ATTENTION: Any = attention._sdpa_kernel
_BACKEND: Any = attention._backend_from_string
_KEY = "modes"


def _attention_now(args: tuple[Any, ...]) -> tuple[Any, ...]:
    priority = bool(args[1]) if len(args) > 1 else False
    return tuple(attention._cur_sdpa_kernel_backends(priority)), priority


_NOW: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    _SET_GRAD: lambda _: (torch.is_grad_enabled(),),
    _SET_ATTENTION: _attention_now,
}
"""Switches that set something, and with which arguments they set what is set now."""

SWITCHES: frozenset[Any] = frozenset({*_EXITS, *_EXITS.values(), *_NOW})
"""What changes the mode in which the ops after it run."""


@dataclass(frozen=True)
class Switch:
    """One switch: its function, and arguments without nodes."""

    function: Any
    args: tuple[Any, ...]

    def now(self) -> Switch:
        """The switch of this kind that changes nothing."""
        return Switch(self.function, _NOW[self.function](self.args))


def take_out_switches(gm: GraphModule) -> None:
    """Remove the switches of a torch-level graph, and tell each op its modes: the switches that are on when it runs.

    What is set outside of the graph has to be what is set now. A graph whose switches are not understood is left as it
    is.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in {*SWITCHES, _BACKEND}]
    if not _are_understood(nodes):
        return
    on: list[tuple[Node, Switch]] = []
    for node in gm.graph.nodes:
        if node.target in _EXITS:
            on.append((node, Switch(node.target, _constants(node))))
        elif node.target in _EXITS.values():
            at = [entered for entered, _ in on].index(node.args[0])
            # The end of inference mode brings back the grad mode that was before.
            on[at:] = [] if on[at][1].function is _ENTER_INFERENCE else on[at + 1 :]
        elif node.target in _NOW:
            switch = Switch(node.target, _constants(node))
            inside = max([i + 1 for i, (_, one) in enumerate(on) if one.function is _ENTER_INFERENCE], default=0)
            on[inside:] = [one for one in on[inside:] if one[1].function is not switch.function]
            if inside or switch != switch.now():
                on.append((node, switch))
        elif node.op not in ("placeholder", "output"):
            node.meta[_KEY] = tuple([switch for _, switch in on])
    for node in reversed(nodes):
        gm.graph.erase_node(node)
    gm.recompile()


def put_switches_around(gm: GraphModule) -> None:
    """Give a part of a graph from which :func:`take_out_switches` has taken them the switches that its ops need.

    The part leaves everything switched as it was.
    """
    on: list[tuple[Switch, Node]] = []
    for node in list(gm.graph.nodes):
        if node.op not in ("placeholder", "get_attr"):
            with gm.graph.inserting_before(node):
                on = _switch(gm.graph, on, node.meta.get(_KEY, ()))
    gm.recompile()


def _switch(graph: Graph, on: list[tuple[Switch, Node]], wanted: Sequence[Switch]) -> list[tuple[Switch, Node]]:
    same = 0
    while same < min(len(on), len(wanted)) and on[same][0] == wanted[same]:
        same += 1
    to_set = {switch.function for switch in wanted[same:]}
    for switch, node in reversed(on[same:]):
        if switch.function in _EXITS:
            graph.call_function(_EXITS[switch.function], (node,))
        elif switch.function not in to_set:
            before = [one for one, _ in on[:same] if one.function is switch.function]
            _call(graph, before[-1] if before else switch.now())
    return [*on[:same], *[(switch, _call(graph, switch)) for switch in wanted[same:]]]


def _call(graph: Graph, switch: Switch) -> Node:
    args = switch.args
    if switch.function is _SET_ATTENTION:  # the code of a graph cannot name its backends
        args = ([graph.call_function(_BACKEND, (backend.name,)) for backend in args[0]], *args[1:])
    return graph.call_function(switch.function, args)


def _are_understood(nodes: Sequence[Node]) -> bool:
    for node in nodes:
        if node.kwargs or (node.target in _EXITS.values() and node.args[0] not in nodes):
            return False
        others = [source for source in node.all_input_nodes if source.target is not _BACKEND]
        if others and node.target not in _EXITS.values():
            return False
        if any(user not in nodes for user in node.users):
            return False
    return True


def _constants(node: Node) -> tuple[Any, ...]:
    args = map_arg(node.args, lambda backend: _BACKEND(*backend.args))
    return tuple([tuple(arg) if isinstance(arg, (list, tuple)) else arg for arg in args])


def ending_at_errors(gm: GraphModule) -> Callable[..., Any]:
    """Return the forward of a torch-level graph, which leaves the modes as they were where an op raises."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in SWITCHES]
    if not nodes:
        return gm.forward
    watched = GraphModule(gm, Graph())
    renamed: dict[Node, Node] = {}
    watched.graph.output(watched.graph.graph_copy(gm.graph, renamed))
    for node in nodes:
        renamed[node].target = _WATCHED.get(node.target, node.target)
    watched.recompile()
    settings = [Switch(node.target, _constants(node)) for node in nodes if node.target in _NOW]

    @functools.wraps(gm.forward)
    def forward(*args: Any) -> Any:
        before, depth = [switch.now() for switch in settings], len(_entered.modes)
        try:
            return watched.forward(*args)
        except BaseException:  # an interrupt too ends a `with`
            while len(_entered.modes) > depth:
                exit_mode, mode = _entered.modes.pop()
                exit_mode(mode)
            for switch in before:
                switch.function(*switch.args)
            raise

    return forward


class _Entered(threading.local):
    """The modes that graphs have entered and not left, the last one last, and how each is left."""

    def __init__(self) -> None:
        self.modes: list[tuple[Callable[[Any], None], Any]] = []


_entered = _Entered()


def _enter(enter_mode: Callable[..., Any], exit_mode: Callable[[Any], None]) -> Callable[..., Any]:
    def enter(*args: Any) -> Any:
        mode = enter_mode(*args)
        _entered.modes.append((exit_mode, mode))
        return mode

    return enter


def _exit(exit_mode: Callable[[Any], None]) -> Callable[[Any], None]:
    def leave(mode: Any) -> None:
        exit_mode(mode)
        _entered.modes[:] = [entry for entry in _entered.modes if entry[1] is not mode]

    return leave


_WATCHED: dict[Any, Callable[..., Any]] = {
    **{enter_mode: _enter(enter_mode, exit_mode) for enter_mode, exit_mode in _EXITS.items()},
    **{exit_mode: _exit(exit_mode) for exit_mode in _EXITS.values()},
}
