"""What Dynamo reads without a guard, or takes for the same, and is made to guard.

Two things are added to its tree for each graph of ours: that nothing in a module's ``__dict__`` hides a parameter,
buffer or module that was read, a lookup each, passed over with the module; and what tells apart that is equal to
Dynamo: the signs of zeros, the order of an ``OrderedDict``, the history of a tensor. For all backends, from the import
on, a key or an attribute whose absence was met.
"""

from __future__ import annotations

import collections
import copy
import functools
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo import exc, guards
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable


def see_what_hides(guards_set: Any, graph: torch.fx.GraphModule) -> None:
    """Guard that no entry of a module's ``__dict__`` has the name of a parameter, buffer or module that was read.

    Python would find the entry; Dynamo, and its bytecode, look among the parameters. The sources of the graph's inputs
    and those of guards lead over all of them.
    """
    waiting = [getattr(node, "_dynamo_source", None) for node in graph.graph.find_nodes(op="placeholder")]
    waiting += [guard.originating_source for guard in guards_set.inner]
    seen = set()
    while waiting:
        source = waiting.pop()  # of L['self']._parameters['weight'], say
        if source is None or source in seen:
            continue
        seen.add(source)
        register, name = getattr(source, "base", None), getattr(source, "index", None)
        waiting.append(register)
        if (
            register is not None
            and isinstance(name, str)
            and getattr(register, "member", "") in ("_parameters", "_buffers", "_modules")
        ):
            guards_set.inner.add(register.base.make_guard(functools.partial(_not_hidden, attr=name)))


def _not_hidden(builder: Any, guard: Any, attr: str) -> None:
    if attr not in vars(builder.get(guard)):  # where it is, Dynamo has read the entry (a Sequential reads neither)
        builder.NOT_PRESENT_IN_GENERIC_DICT(guard, attr)


def tighten_guards(graph: torch.fx.GraphModule) -> None:
    """In a backend, for the graph that it is given: have Dynamo's guards, which are built afterwards, see more, as
    :func:`look_closer` says, and what hides parameters."""
    context = torch._guards.TracingContext.try_get()
    if context is not None:
        guards_set = context.guards_context.dynamo_guards
        see_what_hides(guards_set, graph)
        look_closer(guards_set, context.traced_code)


def look_closer(guards_set: Any, read: Iterable[types.CodeType]) -> None:
    """Have guards see what Dynamo's take for the same.

    -0.0 and 0.0, which are equal; an ``OrderedDict`` in another order; and where the code that was read asks for it,
    whether an argument is a leaf or a view, which Dynamo reads as constants and does not guard. The checks are
    functions in Python, in Dynamo's tree and passed over with what is around them.
    """
    looks = dict(_LOOKS)
    if any(_OF_HISTORY.intersection((*code.co_names, *_texts_in(code))) for code in read):
        looks["TENSOR_MATCH"] = ("the place in autograd's graph of", _history)
    guards_set.inner = {_looking_closer(guard, looks) for guard in guards_set.inner}


def _texts_in(code: types.CodeType) -> list[str]:
    return [constant for constant in code.co_consts if isinstance(constant, str)]


def _looking_closer(guard: Any, looks: dict[str, tuple[str, Callable[[Any], Any]]]) -> Any:
    if guard.create_fn_name() not in looks:
        return guard
    create, (words, look) = guard.create_fn, looks[guard.create_fn_name()]

    @functools.wraps(create)
    def create_both(builder: Any, guard: Any) -> None:
        create(builder, guard)
        seen = look(builder.get(guard))
        if not seen:
            return
        said = [f"{words} {guard.name}: {seen}"]
        if look is not _order:
            builder.get_guard_manager(guard).add_lambda_guard(lambda value: look(value) == seen, said, None)
            return
        # What guards a dictionary takes no function: the root of the tree does, which is given the local names.
        find = compile(guard.name, "<guard>", "eval")  # Dynamo's own expression, in its own words
        scope = {**guards._get_closure_vars(), "G": builder.scope["G"]}

        def in_order(local_names: dict[str, Any]) -> bool:
            try:
                return bool(_order(eval(find, scope, {"L": local_names})) == seen)
            except (AttributeError, KeyError, IndexError, TypeError):  # what is on the way there has changed
                return False

        builder.guard_manager.root.add_lambda_guard(in_order, said, None)

    closer = copy.copy(guard)
    closer.create_fn = create_both
    return closer


_OF_HISTORY = frozenset({"is_leaf", "grad_fn", "_base", "_is_view", "retains_grad", "output_nr"})


def _history(tensor: torch.Tensor) -> tuple[Any, ...]:
    known = tensor.is_leaf, tensor._is_view(), tensor.retains_grad, tensor.output_nr
    return (*known, type(tensor.grad_fn))


def _order(keyed: Any) -> list[Any]:
    return list(keyed) if isinstance(keyed, collections.OrderedDict) else []


def _signs_of_zeros(value: Any) -> list[float]:
    if isinstance(value, float):
        return [] if value else [math.copysign(1.0, value)]
    if isinstance(value, complex):
        return _signs_of_zeros(value.real) + _signs_of_zeros(value.imag)
    if isinstance(value, (tuple, list, set, frozenset)):
        return [sign for element in value for sign in _signs_of_zeros(element)]
    return []


_LOOKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "CONSTANT_MATCH": ("the signs of the zeros in", _signs_of_zeros),
    "EQUALS_MATCH": ("the signs of the zeros in", _signs_of_zeros),
    "DICT_KEYS_MATCH": ("the order of", _order),
}


def _guard_what_is_missing() -> None:
    """Have Dynamo guard that a key or an attribute is not there where its reading has met the error for that.

    It goes on in the ``except``, without a guard: the key that is put there later would not be seen. For all backends,
    as it is Dynamo that reads, before any is asked.
    """

    def guarding(owner: Any, method: str, missing: type[Exception], guard: Callable[[Any, Any, Any], None]) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def read(self: Any, tx: Any, name: Any) -> Any:
            try:
                return original(self, tx, name)
            except missing:
                guard(self, tx, name)
                raise

        setattr(owner, method, read)

    def no_key(variable: Any, tx: Any, key: Any) -> None:
        variable.install_dict_contains_guard(tx, [key])

    def no_attribute(variable: Any, tx: Any, name: str) -> None:
        if variable.source is not None:
            guards.install_guard(variable.source.make_guard(functools.partial(_is_missing, attr=name)))

    guarding(ConstDictVariable, "getitem_const_raise_exception_if_absent", exc.ObservedKeyError, no_key)
    guarding(UserDefinedObjectVariable, "var_getattr", exc.ObservedAttributeError, no_attribute)


def _is_missing(builder: Any, guard: Any, attr: str) -> None:
    there = hasattr(builder.get(guard), attr)
    said = [f"hasattr({guard.name}, {attr!r}) is {there}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda value: hasattr(value, attr) == there, said, None)


_guard_what_is_missing()
