"""Functions that report a call's backend and memory, and the configuration of this installation."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import Any

import numpy as np

from . import _cpu, _openmp, config, threads
from ._call import Call
from ._dispatch import Explanation, prepared, requested
from ._loss_checks import least_workspace
from ._version import __version__
from .arguments import axis_named_dim, shown
from .backends import DEVICES, backends, cpu
from .errors import MissingKernelError, ParamInvalidError, ProcessEndingError
from .operators import functions, losses, second_order
from .operators.options import MIN_WORKSPACE_BYTES
from .operators.table import OPERATORS


@functools.cache
def _signature(op_name: str) -> inspect.Signature:
    module = next(each for each in (functions, losses, second_order) if hasattr(each, op_name))
    return inspect.signature(getattr(module, op_name))


def _check_name(op_name: object, function: str) -> None:
    """Refuse what is not the name of a public operator. `function` is the public function that got it."""
    if not isinstance(op_name, str) or op_name not in OPERATORS:
        message = f"op_name: expected one of {', '.join(OPERATORS)}, got {shown(op_name)}"
        raise ParamInvalidError(message, operator=function)


def _arguments(op_name: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of a call of a public operator by name."""
    try:
        bound = _signature(op_name).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op_name}: {error}") from None
    bound.apply_defaults()
    if bound.arguments.get("dim") is not None:
        bound.arguments["axis"] = axis_named_dim(bound.arguments["axis"], bound.arguments["dim"], op_name)
    return bound.arguments


def _checked_call(op_name: str, arguments: dict[str, Any]) -> tuple[Call, int, Explanation]:
    """Return a checked call, its number of threads (0: the default), and how it would be computed."""
    operator = OPERATORS[op_name]
    values = [arguments[name] for name in operator.parameters]
    return prepared(operator, values, arguments.get("out"), arguments["backend"], arguments["num_threads"])


def bound_call(op_name: str, args: tuple, kwargs: dict) -> tuple[Call, int, Explanation]:
    """Return the checked call of a public operator, its number of threads (0: the default), and how it is computed."""
    return _checked_call(op_name, _arguments(op_name, args, kwargs))


def explain(op_name: str, *args: Any, **kwargs: Any) -> Explanation:
    """Return which backend would compute a call, why, and how: ``ag.explain("softmax", x)`` computes nothing.

    Parameters
    ----------
    op_name : str
        Name of a public operator.
    *args, **kwargs
        The arguments of the call.

    Returns
    -------
    Explanation
        Named tuple ``backend, reason``. On the CPU, its attributes `variant`, `plan` and `threads` name the instruction
        set, the plan, and the number of threads of calls that follow one another; all rows are assumed to take part.
        `estimated_ns` is the estimated time of a row-wise operator or of `cross_entropy` in nanoseconds, by which its
        plan was chosen. On other backends they are None. If no device is usable, the attribute `details` tells
        where one was looked for, or which libraries were opened. `transferred_bytes` is about the number of bytes that
        a call on arrays of the host copies to a device and back. It does not depend on values.

    Raises
    ------
    AscendGradError
        Whatever the call itself would raise.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> backend, reason = ag.explain("softmax", [1.0, 2.0], backend="cpu")
    >>> backend, reason
    ('cpu', 'requested by the backend argument')
    >>> ag.explain("softmax", [1.0, 2.0], backend="cpu").plan
    'rows in place'
    """
    _check_name(op_name, "explain")
    return bound_call(op_name, args, kwargs)[-1]


def workspace_size(op_name: str, *args: Any, **kwargs: Any) -> int:
    """Return an upper bound of the memory that a call takes beyond its arguments and results, in bytes.

    ``ag.workspace_size("softmax", x)`` is about the call ``ag.softmax(x)``. Only shapes, dtypes and layouts matter, not
    values. The bound holds for the backend that would compute the call, as `explain` returns it.

    Parameters
    ----------
    op_name : str
        Name of a public operator.
    *args, **kwargs
        The arguments of the call. ``workspace_bytes=0`` asks for the least `workspace_bytes` of such calls, which small
        calls do not use up.

    Returns
    -------
    int
        Number of bytes. Row-wise operators take buffers per thread, partial sums, and a copy of the result if `out`
        overlaps an input. Linear operators take at most `workspace_bytes`, an accumulator of the size of `input` if the
        results have 16 bits, and a copy of every result whose `out` overlaps an input. On an Ascend NPU it is the
        largest workspace that an operator's first stage requests; arrays of the host also need a copy in device memory.

    Raises
    ------
    AscendGradError
        Whatever the call itself would raise.
    MemoryError
        A result has more than 2**57 bytes.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> x = np.zeros((512, 512), np.float32)
    >>> ag.workspace_size("softmax_backward", x, x, num_threads=1) < 2**20
    True
    """
    _check_name(op_name, "workspace_size")
    arguments = _arguments(op_name, args, kwargs)
    least = arguments.get("workspace_bytes")
    if type(least) is int and least == 0:
        call, _, _ = _checked_call(op_name, {**arguments, "workspace_bytes": None})
        return max(MIN_WORKSPACE_BYTES, least_workspace(call))
    call, num_threads, choice = _checked_call(op_name, arguments)
    for device in DEVICES:
        if device.NAME == choice.backend:
            try:
                return device.workspace_size(call)
            except (MissingKernelError, ProcessEndingError):
                if call.device is not None or requested(kwargs.get("backend"))[0] != "auto":
                    raise
                return workspace_size(op_name, *args, **kwargs)  # the device is now known not to take such calls
    return cpu.workspace_size(call, num_threads)


def get_include() -> str:
    """Return the directory of the library's C headers, for ``-I``.

    Returns
    -------
    str
        The path, below which the headers are in ``ascend_grad/``.

    Examples
    --------
    >>> import os
    >>> import ascend_grad as ag
    >>> os.path.exists(os.path.join(ag.get_include(), "ascend_grad", "rowwise", "rowwise.h"))
    True
    """
    package = os.path.dirname(os.path.realpath(__file__))
    installed = os.path.join(package, "include")
    # An editable install runs from the source tree, where include/ is next to the package.
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(package), "include")


def _system() -> str:
    """Return the names and versions of the kernel, the distribution and the C library."""
    import platform  # imported here, as few programs need it

    kernel = os.uname()
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        distribution = "unknown distribution"
    libc = " ".join(platform.libc_ver()).strip() or "unknown C library"
    return f"{kernel.sysname} {kernel.release} {kernel.machine}, {distribution}, {libc}"


def _cpu_model() -> str:
    """Return the name of the CPU, with family and model numbers, as virtual machines shorten the name."""
    fields: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or os.uname().machine
    if "cpu family" in fields and "model" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name


def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print or return the configuration of this installation and the hardware that it found: ``ag.show_config()``.

    Parameters
    ----------
    mode : {"stdout", "dict"}, default "stdout"
        Whether to print the configuration or to return it as a dict.

    Returns
    -------
    dict or None
        The configuration with ``mode="dict"``.

    Raises
    ------
    ParamInvalidError
        161002, for another mode.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> sorted(ag.show_config(mode="dict"))
    ['backends', 'cpu', 'environment', 'openmp', 'system', 'threads', 'version']
    """
    if not isinstance(mode, str) or mode not in ("stdout", "dict"):
        raise ParamInvalidError(f"mode: expected 'stdout' or 'dict', got {shown(mode)}", operator="show_config")
    result = {
        "version": {
            "ascend_grad": __version__,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "compiler": _cpu.COMPILER,
        },
        "system": _system(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "variant": _cpu.variant(),
            "supported": list(_cpu.supported_variants()),
            "remarks": _cpu.remarks(),
        },
        "openmp": _openmp.DESCRIPTION,
        "threads": threads.get_num_threads(),
        "environment": {
            **config.SETTINGS,
            **{name: value for device in DEVICES for name in device.ENVIRONMENT if (value := os.environ.get(name))},
        },
        "backends": {name: status._asdict() for name, status in backends().items()},
    }
    if mode == "dict":
        return result
    for section, content in result.items():
        if isinstance(content, dict):
            print(f"{section}:")
            for name, value in content.items():
                print(f"  {name}: {value}")
        else:
            print(f"{section}: {content}")
    return None
