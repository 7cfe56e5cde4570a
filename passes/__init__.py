"""Constraints and rewrites for any `torch.fx.GraphModule`: pure torch.fx, no CUDA.

Read `constraint` first (how a rule is named, judged and reported), then `capturable` and `contract` (the rules), then
`base` and `pipeline` (passes and their driver). A graph as text is in `show`, well-formedness in `verify`, what a node
writes and draws in `effects`. Each rewrite has a file of its own; none of those exported here changes a bit of a
result. `repeats` looks for equal regions and changes nothing.
"""

from .aliasing import CloneAliasedOutputs
from .base import Pass, PassError
from .call_site import CallSite
from .capturable import CAPTURABLE, check
from .common_subexpressions import MergeCommonSubexpressions
from .constraint import Constraint, NodeConstraint, Report, Satisfied, Verdict, Violation, Where, judge
from .contract import CONTRACT, UNUSED_INPUT, DifferentiableInputs, UnusedInput, check_call
from .dead_code import RemoveDeadCode
from .device_constants import MoveConstantsToDevice
from .functional import FunctionalForm, Functionalize
from .input_copies import MergeInputCopies
from .lower import LowerToAten
from .no_ops import RemoveNoOps
from .pipeline import AnyPass, Pipeline, PipelineResult, Step, apply, pass_name
from .random_fill import DrawInPlace
from .repeats import Region, Repeat, Repeats, find_repeats
from .verify import WELL_FORMED

__fxgraph_version_mark__ = "0.1.0"

__all__ = [
    "CAPTURABLE",
    "CONTRACT",
    "UNUSED_INPUT",
    "WELL_FORMED",
    "AnyPass",
    "CallSite",
    "CloneAliasedOutputs",
    "Constraint",
    "DifferentiableInputs",
    "DrawInPlace",
    "FunctionalForm",
    "Functionalize",
    "LowerToAten",
    "MergeCommonSubexpressions",
    "MergeInputCopies",
    "MoveConstantsToDevice",
    "NodeConstraint",
    "Pass",
    "PassError",
    "Pipeline",
    "PipelineResult",
    "Region",
    "RemoveDeadCode",
    "RemoveNoOps",
    "Repeat",
    "Repeats",
    "Report",
    "Satisfied",
    "Step",
    "UnusedInput",
    "Verdict",
    "Violation",
    "Where",
    "apply",
    "check",
    "check_call",
    "find_repeats",
    "judge",
    "pass_name",
]
