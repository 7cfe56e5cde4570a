"""What a callable and its arguments must satisfy.

For each rule the smallest violation, the nearest non-violation and the exact message; then the variants of each rule.
"""

from __future__ import annotations

import collections
import enum
import functools
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

from passes import CONTRACT, UNUSED_INPUT, CallSite, Constraint, DifferentiableInputs, UnusedInput, Where, check_call
from passes.contract_callable import global_hooks

RULES = {rule.id: rule for rule in (*CONTRACT, *UNUSED_INPUT)}
HERE = __file__


def identity(x: Any, *rest: Any, **named: Any) -> Any:
    return x


def two(x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
    return x * scale if y is None else x + y


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x)


class Marked(torch.Tensor):
    pass


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


def log_shapes(*args: Any) -> None:
    pass


def net(change: Callable[[Net], object]) -> Net:
    built = Net()
    change(built)
    return built


def site(callable: Any, *args: Any, **kwargs: Any) -> CallSite:
    return CallSite(callable, args, kwargs)


@dataclass(frozen=True)
class Triple:
    """The smallest subject that violates a rule, the nearest that does not, and what is said of the first."""

    bad: Any
    good: Any
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", textwrap.dedent(self.message).strip("\n"))


with FakeTensorMode():
    ON_CPU, ON_CUDA0 = torch.ones(()), torch.ones(2, device="cuda:0")

IDENTITY = f"{HERE}:{line_of(identity)}"
FORWARD = f"{HERE}:{line_of(Net.forward)}"

TRIPLES: dict[str, Triple] = {
    "not-callable": Triple(
        site(3),
        site(torch.relu),
        """
        [not-callable] what is to be captured cannot be called
          where:    unknown place
          observed: an object of type int
          expected: a function or a torch.nn.Module
          hint:     pass a function or a torch.nn.Module
        """,
    ),
    "module-hooks": Triple(
        site(net(lambda m: m.bn.register_forward_hook(log_shapes))),
        site(net(lambda m: m.bn.register_state_dict_post_hook(log_shapes))),
        f"""
        [module-hooks] a module has a hook that a replay would not run
          where:    module 'bn', {FORWARD}
          observed: forward hook 'log_shapes' ({HERE}:{line_of(log_shapes)})
          expected: no hook
          hint:     remove the hook, capture, and register it again on the outermost module
        """,
    ),
    "buffer-requires-grad": Triple(
        site(net(lambda m: m.bn.running_mean.requires_grad_())),
        site(net(lambda m: m.bn.weight.requires_grad_())),
        f"""
        [buffer-requires-grad] a buffer requires grad
          where:    buffer 'bn.running_mean', {FORWARD}
          observed: requires_grad=True, shape (2,), torch.float32, cpu
          expected: requires_grad=False
          hint:     make it a torch.nn.Parameter, or call requires_grad_(False) on it
        """,
    ),
    "wrong-arguments": Triple(
        site(two),
        site(two, 1),
        f"""
        [wrong-arguments] the arguments do not fit the signature
          where:    {HERE}:{line_of(two)}
          observed: 0 positional arguments, keywords: none (missing a required argument: 'x')
          expected: arguments for (x, y=None, *, scale=1.0)
          hint:     pass sample arguments exactly as the real call will pass them
        """,
    ),
    "unsupported-argument": Triple(
        site(identity, [{"mask": object()}]),
        site(identity, [{"mask": None}]),
        f"""
        [unsupported-argument] an argument is neither a tensor nor an immutable constant
          where:    args[0][0]['mask'], {IDENTITY}
          observed: an object of type builtins.object
          expected: a tensor, an immutable constant, or a container of these
          hint:     {RULES["unsupported-argument"].hint}
        """,
    ),
    "tensor-subclass": Triple(
        site(identity, torch.ones(2).as_subclass(Marked)),
        site(identity, torch.nn.Parameter(torch.ones(2))),
        f"""
        [tensor-subclass] a tensor is of a subclass of torch.Tensor
          where:    args[0], {IDENTITY}
          observed: {__name__}.Marked
          expected: torch.Tensor, torch.nn.Parameter or torch.nn.Buffer
          hint:     pass the plain tensors that the subclass wraps; run a lazy module once to make its parameters real
        """,
    ),
    "unsupported-layout": Triple(
        site(identity, x=torch.eye(2).to_sparse()),
        site(identity, x=torch.eye(2).expand(3, 2, 2)),
        f"""
        [unsupported-layout] a tensor is not a plain strided one
          where:    kwargs['x'], {IDENTITY}
          observed: layout torch.sparse_coo, shape (2, 2), torch.float32, cpu
          expected: a dense tensor with layout torch.strided
          hint:     convert it, e.g. with to_dense(), dequantize() or torch.nested.to_padded_tensor()
        """,
    ),
    "meta-tensor": Triple(
        site(net(lambda m: m.to("meta"))),
        site(net(lambda m: m.to("meta").to_empty(device="cpu"))),
        f"""
        [meta-tensor] a tensor is on the meta device and has no data
          where:    parameter 'bn.weight', {FORWARD}
          observed: device meta
          expected: a device with memory, such as cpu or cuda:0
          hint:     materialise it first, e.g. with module.to_empty(device=...) and an initialisation
        """,
    ),
    "several-devices": Triple(
        site(identity, ON_CPU, ON_CUDA0),
        site(identity, 1.0, ON_CUDA0),
        f"""
        [several-devices] tensors are on several devices
          where:    args[0], {IDENTITY}
          observed: cpu: args[0]
          expected: cuda:0, the device of args[1]
          hint:     move everything to one device with .to(device); a 0-dim CPU tensor too
        """,
    ),
    "unused-input": Triple(
        DifferentiableInputs(("args[0]", "parameter 'w'"), ("parameter 'w'",), Where("m.py", 3)),
        DifferentiableInputs(("args[0]", "parameter 'w'"), (), Where("m.py", 3)),
        """
        [unused-input] an input requires grad but no output depends on it
          where:    parameter 'w', m.py:3
          observed: its gradient is None
          expected: a gradient for each input that requires grad
          hint:     use the input, set requires_grad=False on it, or pass allow_unused_input=True
        """,
    ),
}


@pytest.fixture(scope="module")
def scripted() -> torch.jit.ScriptModule:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(torch.nn.ReLU())


@pytest.fixture
def triples(scripted: torch.jit.ScriptModule) -> dict[str, Triple]:
    message = """
        [scripted-callable] the callable is compiled by TorchScript
          where:    the module itself
          observed: a torch.jit.ScriptModule of ReLU
          expected: a torch.nn.Module
          hint:     pass the Python module or function that was scripted or traced
        """
    return TRIPLES | {"scripted-callable": Triple(site(scripted), site(torch.nn.ReLU()), message)}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_smallest_violation_gives_exactly_one_message(rule: Constraint[Any], triples: dict[str, Triple]) -> None:
    found = list(rule.violations(triples[rule.id].bad))
    assert str(found[0]) == triples[rule.id].message
    assert len({violation.id for violation in found}) == 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_nearest_non_violation_satisfies(rule: Constraint[Any], triples: dict[str, Triple]) -> None:
    assert rule.verdict(triples[rule.id].good)


def test_the_table_has_no_row_for_a_rule_that_does_not_exist(triples: dict[str, Triple]) -> None:
    assert set(triples) == set(RULES)


# -- hooks ------------------------------------------------------------------------------------------------------------


def other(*args: Any) -> None:
    pass


HOOKS: dict[str, tuple[str, Callable[[torch.nn.Module], Any]]] = {
    "forward": ("forward hook", lambda m: m.register_forward_hook(other)),
    "forward kwargs": ("forward hook with kwargs", lambda m: m.register_forward_hook(other, with_kwargs=True)),
    "always": ("forward hook with always_call", lambda m: m.register_forward_hook(other, always_call=True)),
    "both": (
        "forward hook with kwargs with always_call",
        lambda m: m.register_forward_hook(other, with_kwargs=True, always_call=True),
    ),
    "pre": ("forward-pre hook", lambda m: m.register_forward_pre_hook(other)),
    "pre kwargs": ("forward-pre hook with kwargs", lambda m: m.register_forward_pre_hook(other, with_kwargs=True)),
    "backward": ("backward hook", lambda m: m.register_full_backward_hook(other)),
    "backward pre": ("backward-pre hook", lambda m: m.register_full_backward_pre_hook(other)),
    "legacy": ("backward hook (not full)", lambda m: m.register_backward_hook(other)),
}


@pytest.mark.parametrize("place", ["", "0", "0.0"])
@pytest.mark.parametrize(("kind", "register"), HOOKS.values(), ids=HOOKS.keys())
def test_each_kind_of_hook_is_named_on_every_submodule(
    kind: str, register: Callable[[torch.nn.Module], Any], place: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()))
    register(model.get_submodule(place))
    (violation,) = RULES["module-hooks"].violations(site(model))
    assert violation.observed == f"{kind} 'other' ({HERE}:{line_of(other)})"
    assert violation.where.path == (f"module {place!r}" if place else "the module itself")


def test_all_hooks_are_reported_at_once_in_the_order_of_modules() -> None:
    model = Net()
    for _, register in HOOKS.values():
        if _ != "backward hook (not full)":  # torch does not let it stand beside a full one
            register(model.bn)
    model.register_forward_hook(log_shapes)
    found = list(RULES["module-hooks"].violations(site(model)))
    assert [violation.where.path for violation in found] == ["the module itself", *["module 'bn'"] * 8]


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_state_dict_pre_hook(other),
        lambda m: m.register_load_state_dict_pre_hook(other),
        lambda m: m.register_load_state_dict_post_hook(other),
        lambda m: m.bn.weight.register_hook(other),
        lambda m: m.bn.weight.register_post_accumulate_grad_hook(other),
    ],
)
def test_state_dict_hooks_and_hooks_of_tensors_are_harmless(register: Callable[[Net], object]) -> None:
    assert check_call(net(register), (torch.ones(3, 2),))


class Masked(prune.L1Unstructured):
    """A pruning method of the user's own."""


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("add", "remove", "hint"),
    [
        (torch.nn.utils.weight_norm, torch.nn.utils.remove_weight_norm, "parametrizations.weight_norm"),
        (torch.nn.utils.spectral_norm, torch.nn.utils.remove_spectral_norm, "parametrizations.spectral_norm"),
        (lambda m: prune.random_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight"), "prune.remove"),
        (lambda m: Masked.apply(m, "weight", 0.5), lambda m: prune.remove(m, "weight"), "prune.remove"),
    ],
)
def test_a_hook_that_computes_a_weight_has_a_hint_of_its_own(add: Any, remove: Any, hint: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    add(module[0])
    report = check_call(module, (torch.randn(3, 4),))
    assert [(violation.id, hint in violation.hint) for violation in report.violations] == [("module-hooks", True)]
    remove(module[0])
    assert check_call(module, (torch.randn(3, 4),)).ok


def test_a_removed_hook_is_gone() -> None:
    model = Net()
    model.register_forward_hook(other).remove()
    assert RULES["module-hooks"].verdict(site(model))


def test_the_hook_of_a_root_that_is_called_through_a_method_would_not_run_either_way() -> None:
    model = Net()
    model.register_forward_hook(other)
    assert RULES["module-hooks"].verdict(site(model.forward))
    assert not RULES["module-hooks"].verdict(site(model.__call__))
    model.bn.register_forward_hook(other)
    assert [v.where.path for v in RULES["module-hooks"].violations(site(model.forward))] == ["module 'bn'"]


def test_a_callable_object_and_a_class_with_call_name_themselves_as_hooks() -> None:
    class Recorder:
        def __call__(self, *args: Any) -> None:
            pass

    model = Net()
    model.register_forward_hook(Recorder())
    model.register_forward_hook(functools.partial(other, 1))
    observed = [violation.observed for violation in RULES["module-hooks"].violations(site(model))]
    assert observed == [
        f"forward hook '{Recorder.__qualname__}' ({HERE}:{line_of(Recorder.__call__)})",
        f"forward hook 'partial' ({HERE}:{line_of(other)})",
    ]


GLOBAL_HOOKS = {
    "forward-pre hook": nn_module.register_module_forward_pre_hook,
    "forward hook": nn_module.register_module_forward_hook,
    "backward-pre hook": nn_module.register_module_full_backward_pre_hook,
    "backward hook": nn_module.register_module_full_backward_hook,
}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_a_hook_registered_for_all_modules_is_refused_too(kind: str) -> None:
    handle = GLOBAL_HOOKS[kind](other)
    try:
        (violation,) = RULES["module-hooks"].violations(site(Net()))
        assert RULES["module-hooks"].verdict(site(two, 1))
    finally:
        handle.remove()
    assert violation.where.path == "every module"
    assert violation.observed == f"global {kind} 'other' ({HERE}:{line_of(other)})"
    assert not list(global_hooks())


# -- arguments --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass
class Thawed:
    value: Any


@dataclass
class Registered:
    value: Any


pytree.register_dataclass(Registered)


class Colour(enum.Enum):
    RED = 1


CONSTANTS = [
    *(None, True, 1, 1.5, 2j, "text", b"bytes", ..., slice(1, None, 2), range(3), Colour.RED, enum.IntEnum("E", "A").A),
    *(torch.float16, torch.device("cpu"), torch.channels_last, torch.strided, torch.Size([1, 2])),
    *(two, len, torch.relu, torch.Tensor.add, int, Net, frozenset({1}), (), [], {}),
]


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: getattr(constant, "__name__", repr(constant)))
def test_immutable_constants_are_allowed_wherever_they_stand(constant: Any) -> None:
    for holder in (constant, [constant], (constant, 1), {"k": constant}, Pair(1, constant), Frozen(constant)):
        assert RULES["unsupported-argument"].verdict(site(identity, holder, key=holder))


CONTAINERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "list": (lambda leaf: [0, leaf], "args[0][1]"),
    "tuple": (lambda leaf: (leaf,), "args[0][0]"),
    "dict": (lambda leaf: {"k": {1: leaf}}, "args[0]['k'][1]"),
    "ordered": (lambda leaf: collections.OrderedDict(k=leaf), "args[0]['k']"),
    "default": (lambda leaf: collections.defaultdict(list, k=leaf), "args[0]['k']"),
    "deque": (lambda leaf: collections.deque([leaf]), "args[0][0]"),
    "namedtuple": (lambda leaf: Pair(1, leaf), "args[0].right"),
    "registered": (lambda leaf: Registered([leaf]), "args[0].value[0]"),
    "frozen": (lambda leaf: Frozen([leaf]), "args[0].value[0]"),
    "frozen in frozen": (lambda leaf: Frozen(Frozen(leaf)), "args[0].value.value"),
}


@pytest.mark.parametrize(("build", "path"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_entered_and_the_path_leads_to_the_leaf(build: Callable[[Any], Any], path: str) -> None:
    assert RULES["unsupported-argument"].verdict(site(identity, build(torch.ones(1))))
    assert list(site(identity, build(tensor := torch.ones(1))).tensor_arguments()) == [(path, tensor)]
    (violation,) = RULES["unsupported-argument"].violations(site(identity, build(bytearray())))
    assert (violation.where.path, violation.observed) == (path, "an object of type builtins.bytearray")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (numpy.ones(2), "convert it: torch.from_numpy(array) for an array, .item() for a scalar"),
        (numpy.float64(1.0), "convert it: torch.from_numpy(array) for an array, .item() for a scalar"),
        (torch.nn.ReLU(), "make it a submodule of the callable, so that its parameters are known"),
        (torch.Generator(), "use the default generator: a replay advances no other"),
        (Thawed(1), RULES["unsupported-argument"].hint),
        (set(), RULES["unsupported-argument"].hint),
        (slice([], None), RULES["unsupported-argument"].hint),
        (functools.partial(two), RULES["unsupported-argument"].hint),
        (type("Text", (str,), {})("a"), RULES["unsupported-argument"].hint),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_is_refused_with_a_hint_that_fits(value: Any, hint: str) -> None:
    (violation,) = RULES["unsupported-argument"].violations(site(identity, value))
    assert violation.hint == hint


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (site(two, 1, 2, 3), "3 positional arguments, keywords: none (too many positional arguments)"),
        (site(two, 1, z=3), "1 positional argument, keywords: 'z' (got an unexpected keyword argument 'z')"),
        (site(two, 1, x=3), "1 positional argument, keywords: 'x' (multiple values for argument 'x')"),
        (site(Net()), "0 positional arguments, keywords: none (missing a required argument: 'x')"),
        (site(Net().forward, 1, 2), "2 positional arguments, keywords: none (too many positional arguments)"),
        (
            site(functools.partial(two, 1), 2, 3),
            "2 positional arguments, keywords: none (too many positional arguments)",
        ),
    ],
)
def test_arguments_that_do_not_bind_are_described(call: CallSite, complaint: str) -> None:
    (violation,) = RULES["wrong-arguments"].violations(call)
    assert violation.observed == complaint


def test_a_wrapper_is_judged_by_its_own_signature() -> None:
    @functools.wraps(two)
    def wrapper(extra: int, x: torch.Tensor) -> torch.Tensor:
        return two(x)

    assert RULES["wrong-arguments"].verdict(site(wrapper, 1, 2))
    assert not RULES["wrong-arguments"].verdict(site(wrapper, 1))


@pytest.mark.parametrize("callable", [torch.relu, torch.add, type("Odd", (), {"__call__": torch.relu})()])
def test_a_callable_without_a_readable_signature_is_not_judged(callable: Any) -> None:
    assert RULES["wrong-arguments"].verdict(site(callable, 1, 2, 3, 4))


# -- tensors ----------------------------------------------------------------------------------------------------------


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|deprecated|legacy):UserWarning")
@pytest.mark.filterwarnings("ignore:.*(deprecated):DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "observed"),
    [
        (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr, shape (2, 2), torch.float32, cpu"),
        (quantised, "a quantised tensor, shape (2,), torch.qint8, cpu"),
        (lambda: nested(torch.strided), "a nested tensor, torch.float32, cpu"),
        (lambda: nested(torch.jagged), "a nested tensor, torch.float32, cpu"),
        (lambda: torch.ones(2).to_mkldnn(), "layout torch._mkldnn, shape (2,), torch.float32, cpu"),
    ],
)
def test_each_layout_is_named_by_one_rule_only(build: Callable[[], torch.Tensor], observed: str) -> None:
    report = check_call(identity, (build(),))
    assert [(violation.id, violation.observed) for violation in report.violations] == [("unsupported-layout", observed)]


def test_parameters_and_buffers_are_judged_like_arguments() -> None:
    model = Net()
    model.register_buffer("table", torch.eye(2).to_sparse())
    model.marked = torch.nn.Parameter(torch.ones(1).as_subclass(Marked))
    report = check_call(model, (torch.ones(3, 2),))
    assert [(violation.id, violation.where.path) for violation in report.violations] == [
        ("tensor-subclass", "parameter 'marked'"),
        ("unsupported-layout", "buffer 'table'"),
    ]


def test_a_buffer_object_is_a_plain_tensor() -> None:
    model = Net()
    model.table = torch.nn.Buffer(torch.ones(1))
    assert check_call(model, (torch.ones(3, 2),))


def test_the_uninitialised_parameters_of_a_lazy_module_are_refused_until_it_has_run_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some versions of torch warn that lazy modules are new
        lazy = torch.nn.LazyLinear(2)
    report = check_call(lazy, (torch.ones(3, 2),))
    assert "tensor-subclass" in report.ids
    lazy(torch.ones(3, 2))
    assert "tensor-subclass" not in check_call(lazy, (torch.ones(3, 2),)).ids


def test_devices_differ_by_index_and_the_modules_own_device_decides() -> None:
    rule = RULES["several-devices"]
    if torch.cuda.device_count() == 1:
        pytest.skip("fake tensors of a second GPU need no GPU at all, or a second one")
    with FakeTensorMode():
        on_cuda1 = torch.ones(2, device="cuda:1")
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(on_cuda1)
    (violation,) = rule.violations(site(model, ON_CUDA0))
    assert (violation.observed, violation.expected) == ("cuda:0: args[0]", "cuda:1, the device of parameter 'weight'")
    assert rule.verdict(site(model, on_cuda1))


def test_a_foreign_device_is_one_violation_however_many_tensors_are_on_it() -> None:
    arguments = [torch.ones(1) for _ in range(5)]
    (violation,) = RULES["several-devices"].violations(site(identity, ON_CUDA0, arguments))
    assert violation.observed == "cpu: args[1][0], args[1][1], args[1][2] and 2 more"


def test_meta_tensors_are_not_another_device() -> None:
    assert RULES["several-devices"].verdict(site(identity, torch.ones(1), torch.ones(1, device="meta")))


# -- the whole --------------------------------------------------------------------------------------------------------


def test_an_ordinary_call_satisfies_every_rule() -> None:
    for callable, args in ((Net(), (torch.ones(3, 2),)), (two, (torch.ones(1), torch.ones(1))), (torch.relu, (1,))):
        assert str(check_call(callable, args)) == "no violations"


def test_all_violations_come_at_once_with_the_name_of_the_callable() -> None:
    model = net(lambda m: m.bn.running_var.requires_grad_())
    model.bn.register_forward_hook(other)
    report = check_call(model, (torch.eye(2).to_sparse(), object()), name="callables[2]")
    assert report.ids == (
        "module-hooks",
        "buffer-requires-grad",
        "wrong-arguments",
        "unsupported-argument",
        "unsupported-layout",
    )
    assert [str(violation.where.path).partition(", ")[0] for violation in report.violations] == ["callables[2]"] * 5
    assert str(report).splitlines()[0] == "5 violations"


def test_scripted_functions_and_submodules_are_found(scripted: torch.jit.ScriptModule) -> None:
    with pytest.warns(DeprecationWarning):
        function = torch.jit.script(_double)
    (violation,) = RULES["scripted-callable"].violations(site(function, 1))
    assert violation.observed == "a torch.jit.ScriptFunction"
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sequential(scripted))
    assert [v.where.path for v in RULES["scripted-callable"].violations(site(model))] == ["module '1.0'"]


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_the_place_survives_decorators_partials_and_missing_source() -> None:
    decorated = torch.no_grad()(two)
    for callable in (two, decorated, functools.partial(two, 1), functools.partial(decorated)):
        where = site(callable).where()
        assert (where.file, where.line) == (HERE, line_of(two))
    scope: dict[str, Any] = {}
    exec(compile("def made(x):\n    return x\n", "<string>", "exec"), scope)
    assert str(site(scope["made"]).where("args[0]")) == "args[0], <string>:1"
    assert str(site(torch.relu).where()) == "unknown place"


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([1], {}, "args must be a tuple, got list"),
        ((), [], "kwargs must be a dict, got list"),
        ((), {1: 2}, "kwargs must have string keys, got 1"),
    ],
)
def test_a_call_site_of_the_wrong_shape_is_a_type_error(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CallSite(two, args, kwargs)


def test_unused_inputs_are_reported_in_the_order_of_the_inputs() -> None:
    subject = DifferentiableInputs(("a", "b", "c"), ("c", "a"))
    assert [violation.where.path for violation in UnusedInput().violations(subject)] == ["a", "c"]
    with pytest.raises(ValueError, match=r"\['d'\]"):
        DifferentiableInputs(("a",), ("d",))


def test_judging_calls_nothing_and_changes_nothing() -> None:
    def explode(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was called")

    model = Net()
    before = {name: (value.clone(), value._version) for name, value in model.state_dict().items()}
    argument = torch.ones(3, 2)
    assert check_call(explode, (argument,))
    assert check_call(model, (argument,))
    assert argument._version == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name][0])
        assert value._version == before[name][1]


def iterate() -> Iterator[int]:
    yield 1


def test_an_iterator_is_refused_since_a_capture_could_read_it_once_only() -> None:
    (violation,) = RULES["unsupported-argument"].violations(site(identity, iterate()))
    assert violation.observed == "an object of type builtins.generator"
