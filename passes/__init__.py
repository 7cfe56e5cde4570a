"""Constraints and rewrites for any `torch.fx.GraphModule`: pure torch.fx, no CUDA.

Read `constraint` first (how a rule is named, judged and reported), then `capturable` and `contract` (the rules), then
`base` and `pipeline` (passes and their driver). A graph as text is in `show`, well-formedness in `verify`.
"""

from .aliasing import CloneAliasedOutputs
from .base import Pass, PassError
from .call_site import CallSite
from .capturable import CAPTURABLE, check
from .constraint import Constraint, NodeConstraint, Report, Satisfied, Verdict, Violation, Where, judge
from .contract import CONTRACT, UNUSED_INPUT, DifferentiableInputs, UnusedInput, check_call
from .pipeline import AnyPass, Pipeline, PipelineResult, Step, apply
from .random_fill import DrawInPlace
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
    "NodeConstraint",
    "Pass",
    "PassError",
    "Pipeline",
    "PipelineResult",
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
    "judge",
]
