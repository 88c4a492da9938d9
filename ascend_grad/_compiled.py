"""Import what compiled modules import: each other, and other packages.

Tools that freeze programs, such as PyInstaller, find imports only in Python sources.
"""

# mypy: disable-error-code="attr-defined"
# Modules without functions for Python have no stubs.

import warnings  # noqa: F401

import ml_dtypes  # noqa: F401
import numpy.exceptions  # noqa: F401

from . import (  # noqa: F401
    _acl,
    _aclnn,
    _array_types,
    _call,
    _checks,
    _cpu,
    _cpu_backend,
    _cross_entropy_finish,
    _cross_entropy_full,
    _cross_entropy_python,
    _cross_entropy_rows,
    _cross_entropy_schedule,
    _cross_entropy_tasks,
    _cyutility,
    _dispatch,
    _dlpack,
    _dtypes,
    _linear_candidates,
    _linear_features,
    _linear_hvp,
    _linear_hvp_streamed,
    _linear_loss,
    _linear_packed,
    _linear_packing,
    _linear_partial_sums,
    _linear_plan,
    _linear_problem,
    _linear_python,
    _linear_results,
    _linear_rows_streamed,
    _linear_run,
    _linear_schedule,
    _linear_sparse,
    _linear_sparse_python,
    _linear_top_k,
    _linear_views,
    _linear_vocab_streamed,
    _loss_arguments,
    _loss_checks,
    _loss_options,
    _memory,
    _openmp,
    _overlap,
    _rowwise_candidates,
    _rowwise_costs,
    _rowwise_expanded,
    _rowwise_plan,
    _rowwise_python,
    _rowwise_schedule,
    _target_checks,
    _tasks,
    _threads,
    _views,
)
