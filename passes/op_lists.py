"""What is known of single operators that no CUDA graph can hold: data for the rules in `capturable`.

Two kinds of names appear. *Plain* names (``item``, ``nonzero``) stand for the ATen operator, the function in
``torch`` and the method of ``torch.Tensor`` alike. *Full* names (``aten.topk.default``) are what ``str`` of an
overload gives.
"""

from __future__ import annotations

import torch

READS_TO_HOST: frozenset[str] = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "tolist", "numpy"}
    | {"__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"}
)
"""Plain names of what hands a value of the device to the host, whatever the arguments."""

CHECKS_ON_HOST: frozenset[str] = frozenset({"_assert_scalar", "_linalg_check_errors", "istft"})
"""Plain names of checks that look at a value on the host. ``_assert_async`` checks on the device and is fine."""

SCALARS_ON_HOST: frozenset[str] = frozenset(
    {"aten.normal.float_Tensor", "aten.normal.Tensor_Tensor"}
    | {
        "aten.masked_fill.Tensor",
        "aten.masked_fill_.Tensor",
        "aten.index_fill.int_Tensor",
        "aten.index_fill_.int_Tensor",
        "aten.narrow.Tensor",
        "aten.tensor_split.tensor_indices_or_sections",
    }
    | {f"aten.{name}.{kind}" for name in ("linspace", "logspace") for kind in ("Tensor_Tensor", "Tensor_Scalar")}
    | {f"aten.{name}.Scalar_Tensor" for name in ("linspace", "logspace")}
)
"""Full names of ops whose kernel reads a tensor's value on the host: ``normal`` checks ``std.min().ge(0).item()``;
``masked_fill``, ``index_fill``, ``linspace`` and ``logspace`` take ``.item()`` of a 0-dim tensor. ``multinomial``
checks its input on the device."""

STATUS_ON_HOST: frozenset[str] = frozenset(
    {"linalg_inv", "inverse", "linalg_cholesky", "cholesky", "linalg_solve", "linalg_tensorinv", "linalg_tensorsolve"}
    | {"linalg_lu_factor", "linalg_ldl_factor", "linalg_eig", "linalg_eigvals", "_linalg_eigvals"}
    | {"matrix_exp", "linalg_matrix_exp"}
)
"""Plain names of linear algebra that looks at the solver's status on the host (the ``_ex`` variants do not, unless with
``check_errors=True``), or, as ``matrix_exp`` does, at norms to choose the degree of its polynomial."""

STATUS_UNLESS_EMPTY: frozenset[str] = frozenset(
    {"svd", "linalg_svd", "_linalg_svd", "linalg_svdvals", "svd_lowrank", "pca_lowrank", "nuclear_norm"}
    | {"pinverse", "linalg_pinv", "linalg_matrix_rank", "linalg_eigh", "linalg_eigvalsh", "_linalg_eigh"}
)
"""Plain names of what computes singular values or the eigenvalues of a symmetric matrix. Both look at the solver's
status on the host, with any driver, and of the singular values also whether they have converged; there are no variants
that do not. Matrices without elements never get there."""

SINGULAR_VALUES_FOR: dict[str, tuple[object, ...]] = {
    "linalg_cond": (None, 2, -2, "nuc"),
    "linalg_matrix_norm": ("nuc", 2, -2),
    "linalg_norm": ("nuc",),
    "norm": ("nuc",),
}
"""Plain names of what computes singular values for these orders, its second argument (``ord``, or ``p``). What a 2
means to ``linalg_norm`` depends on the dimensions."""

WAITS_UNLESS_EMPTY: frozenset[str] = frozenset({"linalg_ldl_factor_ex", "linalg_ldl_solve"})
"""Plain names of what waits for the device inside: ``ldl_solve`` calls ``cudaDeviceSynchronize``, and cuSOLVER's
``sytrf``, of which ``ldl_factor_ex`` consists, fails in a capture. Matrices without elements never get there."""

LU_FACTORISING: frozenset[str] = frozenset(
    {"linalg_lu_factor_ex", "linalg_lu", "_lu_with_info", "linalg_solve_ex", "_linalg_solve_ex", "linalg_inv_ex"}
    | {"det", "linalg_det", "_linalg_det", "slogdet", "linalg_slogdet", "_linalg_slogdet", "logdet"}
)
"""Plain names of what factorises its first argument as LU. cuSOLVER and cuBLAS do that on the stream; to MAGMA, which
ATen prefers for some shapes, belongs a ``cudaDeviceSynchronize``. See `capturable_ops.is_factorised_by_magma`."""

INVERTING: frozenset[str] = frozenset({"matrix_power", "linalg_matrix_power"})
"""Plain names of what inverts its argument, and looks at the status, for a negative power."""

HOST_BOUNDS: frozenset[str] = frozenset({"histc"})
"""Ops that compute missing bounds from the data and read them on the host: only with ``min == max``."""

HOST_FUNCTIONS: frozenset[object] = frozenset({torch.cuda.synchronize})
"""Python functions that make the host wait for the device."""

DATA_DEPENDENT: frozenset[str] = frozenset(
    {"nonzero", "argwhere", "masked_select", "bincount", "combinations", "ctc_loss", "_ctc_loss", "linalg_lstsq"}
    | {"unique", "unique_consecutive", "unique_dim", "_unique", "_unique2", "unique_dim_consecutive"}
)
"""Plain names of ops whose output shape depends on values, whatever the arguments, by torch's own tags."""

SELECTING: frozenset[str] = frozenset({"masked_scatter_backward"})
"""Plain names of ops of a fixed output shape that call ``masked_select`` inside."""

DATA_DEPENDENT_MODULES: tuple[type[torch.nn.Module], ...] = (torch.nn.AdaptiveLogSoftmaxWithLoss, torch.nn.CTCLoss)
"""Leaf modules of torch.nn that call such an op inside: AdaptiveLogSoftmaxWithLoss nonzero, CTCLoss the lengths on
the host.
"""

FORBIDDEN: frozenset[str] = frozenset(
    {"aten._fused_moving_avg_obs_fq_helper.default", "aten._fused_moving_avg_obs_fq_helper_functional.default"}
    | {"fbgemm.dense_to_jagged.default", "fbgemm.jagged_to_padded_dense.default"}
    # On ROCm, topk kernels fault on the second replay.
    | ({"aten.topk.default"} if torch.version.hip is not None else set())
)
"""Full names of ops that torch knows as not replayable without carrying its ``cudagraph_unsafe`` tag."""

PLAIN_HIGHER_ORDER: frozenset[str] = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "triton_kernel_wrapper_mutation",
        "triton_kernel_wrapper_functional",
    }
)
"""Higher-order ops that only wrap one kernel and have no control flow, no Python and no state of their own."""

CONTROL_FLOW: frozenset[str] = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl"})
"""Higher-order ops that choose or repeat graphs which they are given. AOTAutograd leaves them as they are, or fails at
them (``while_loop`` asks for symbolic shapes); others it inlines."""

WRAPPERS: frozenset[str] = frozenset(
    {"tag_activation_checkpoint", "wrap_activation_checkpoint", "autograd_function_apply", "invoke_subgraph"}
    | {"wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast"}
)
"""Higher-order ops that run the graphs which they are given once, in order, in some mode: their ops are judged."""

PRINTERS: frozenset[str] = frozenset({"aten._print.default", "builtins.print", "warnings.warn", "print"})
"""Full names of what writes for a person to read."""

EXOTIC_LAYOUT: frozenset[str] = frozenset(
    {"to_sparse", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "to_mkldnn"}
    | {"sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor"}
    | {"sparse_compressed_tensor", "quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic"}
    # What the functions and methods above become at ATen level, where make_fx on real tensors leaves no fake value.
    | {"_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"}
    | {"_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"}
    | {"_sparse_compressed_tensor_unsafe", "_sparse_csr_tensor_unsafe", "_sparse_csc_tensor_unsafe"}
    | {"_sparse_bsr_tensor_unsafe", "_sparse_bsc_tensor_unsafe", "_nested_tensor_from_tensor_list"}
)
"""Plain names of what makes a tensor that is not strided and dense; needed where a graph carries no fake values."""

EXOTIC_READERS: frozenset[str] = frozenset(
    {"dequantize", "int_repr", "q_scale", "q_zero_point", "q_per_channel_scales", "q_per_channel_zero_points"}
    | {"coalesce", "sparse_mask", "_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices"}
)
"""Plain names of what reads such a tensor and no other."""

KEEPS_LAYOUT: frozenset[str] = frozenset(
    {"clone", "detach", "coalesce", "to", "float", "double", "half", "t", "transpose", "mul", "__mul__", "truediv"}
    | {"div", "neg", "relu", "sqrt", "abs", "sin", "tanh", "pow", "contiguous", "requires_grad_"}
)
"""Plain names of what gives the layout of its one tensor argument, where a graph carries no fake values."""

LITERALS: frozenset[str] = frozenset(
    {"tensor", "full", "scalar_tensor", "zeros", "ones", "lift_fresh_copy", "lift_fresh", "detach_", "clone"}
)
"""Plain names of what makes a constant of numbers, or is a literal's way into a graph."""

MASK_MAKERS: frozenset[str] = frozenset(
    {"gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal", "not_equal"}
    | {
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "isnan",
        "isinf",
        "isfinite",
        "isin",
        "isclose",
        "signbit",
    }
    | {
        "isposinf",
        "isneginf",
        "isreal",
        "bool",
        "byte",
        "any",
        "all",
        "__gt__",
        "__lt__",
        "__ge__",
        "__le__",
        "__eq__",
        "__ne__",
    }
)
"""Plain names of what always gives a boolean tensor, or one of bytes, which index alike."""

MASK_COMBINERS: frozenset[str] = frozenset(
    {"and_", "or_", "xor", "invert", "inv", "not_", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
    | {"__and__", "__or__", "__xor__", "__invert__"}
)
"""Plain names of what gives a boolean tensor when its operands are."""

KEEPS_DTYPE: frozenset[str] = frozenset(
    {"getitem", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"}
    | {"t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "mT", "expand", "expand_as"}
    | {"broadcast_to", "clone", "contiguous", "detach", "to", "cpu", "cuda", "cat", "concat", "stack", "hstack"}
    | {"vstack", "select", "narrow", "index_select", "gather", "take", "take_along_dim", "flip", "roll", "repeat"}
    | {"tile", "chunk", "split", "unbind", "diagonal", "diag", "tril", "triu", "zeros_like", "ones_like", "empty_like"}
    | {"new_zeros", "new_ones", "new_empty", "masked_fill", "index_fill", "scatter", "index_put", "requires_grad_"}
)
"""Plain names of what gives a tensor of its first tensor's dtype, unless it is asked for another one."""

NEVER_ON_STREAM: frozenset[str] = frozenset(
    {"barrier", "monitored_barrier_", "recv_any_source_", "monitored_barrier"}
    | {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    | {"send_object_list", "recv_object_list"}
)
"""Collectives during which the host waits, on any backend: among them those that pickle Python objects."""

STREAM_BACKENDS: tuple[str, ...] = ("nccl",)
"""Backends of torch.distributed that put a collective on the current CUDA stream as ordinary kernels."""
