"""oneDNN's softmax, log-softmax and their gradients, called through the driver onednn.c.

The driver is compiled when it is first needed, with the oneDNN below ``DNNLROOT``, or in this environment
(``pip install onednn-devel-cpu-gomp``), or of the system. It takes one that is built with OpenMP.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ascend_grad as ag

from ..arrays import Operands
from ..case import BACKWARD, DTYPES_OF_16_BITS, FORWARD, FRESH, Case, numpy_dtype
from ..frameworks import Call

SOURCE = Path(__file__).resolve().parents[1] / "onednn.c"

#: The types of oneDNN's softmax, by their numbers in the driver.
TYPES = {"float32": 0, **{name: number for number, name in enumerate(DTYPES_OF_16_BITS, 1)}}


@functools.cache
def driver() -> ctypes.CDLL | None:
    """Compile and load the driver. Without oneDNN or a compiler, print a line and return None."""
    root = Path(os.environ.get("DNNLROOT", sys.prefix))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "onednn.so"
        flags = ["-O2", "-shared", "-fPIC", "-fopenmp", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        flags += [f"-Wl,-rpath,{root / 'lib'}", "-o", str(library)]
        command = [os.environ.get("CC", "cc"), str(SOURCE), *flags, "-ldnnl"]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
            found = ctypes.CDLL(str(library))
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).splitlines()
            reason = next((line for line in lines if "error" in line), lines[0])
            if "dnnl.h" in reason:
                reason = "its headers are missing (pip install onednn-devel-cpu-gomp, or set DNNLROOT)"
            print(f"oneDNN is left out: {reason}", file=sys.stderr)
            return None
    found.rival_new.restype = ctypes.c_void_p
    found.rival_run.argtypes, found.rival_free.argtypes = [ctypes.c_void_p] * 2, [ctypes.c_void_p]
    return found


def version() -> str | None:
    """Return the version of oneDNN, or None if it takes no part."""
    library = driver()
    if library is None:
        return None
    number = library.rival_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class Primitive:
    """A prepared call on arrays, the last of which is the result.

    Attributes
    ----------
    handle : int or None
        The driver's call; None if oneDNN does not compute it.
    is_reference : bool
        Whether oneDNN has no kernel for the call, only plain loops.
    """

    def __init__(self, case: Case, arrays: Sequence[np.ndarray]) -> None:
        self.handle, self.is_reference = None, False
        if not all(a.dtype.isnative and a.dtype.name in TYPES for a in arrays):
            return
        rank, count, is_reference = len(case.shape), len(arrays), ctypes.c_int()
        lengths = ctypes.c_int64 * rank
        # These arrays have to live until the call.
        strides = [lengths(*(step // a.itemsize for step in a.strides)) for a in arrays]
        self.handle = _loaded().rival_new(
            *(int(case.operator.startswith("log")), count, rank, lengths(*case.shape), case.dim),
            (ctypes.c_int * count)(*(TYPES[a.dtype.name] for a in arrays)),
            (ctypes.c_void_p * count)(*map(ctypes.addressof, strides)),
            (ctypes.c_void_p * count)(*(a.ctypes.data for a in arrays)),
            *(ag.get_num_threads(), ctypes.byref(is_reference)),
        )
        self.is_reference = bool(is_reference.value)

    def __del__(self) -> None:
        if self.handle is not None:
            _loaded().rival_free(self.handle)


def _loaded() -> ctypes.CDLL:
    library = driver()
    assert library is not None
    return library


def onednn(case: Case, operands: Operands) -> Call | None:
    """Prepare oneDNN's primitive on the case's arrays, or on dense copies if it has a kernel only for these."""
    if case.operator not in (*FORWARD, *BACKWARD) or case.dtype not in TYPES or driver() is None:
        return None
    fresh, dtype, out_dtype = case.mode == FRESH, numpy_dtype(case.dtype), operands.out.dtype
    arrays = (*operands.inputs, np.empty(case.shape, out_dtype) if fresh else operands.out)
    used, primitive = arrays, Primitive(case, arrays)
    if primitive.handle is None or primitive.is_reference:
        dense = tuple(a if a.flags.c_contiguous and a.dtype == dtype else np.empty(case.shape, dtype) for a in arrays)
        on_copies = Primitive(case, dense)
        if on_copies.handle is not None:
            used, primitive = dense, on_copies
    if primitive.handle is None:
        return None
    run = _loaded().rival_run
    copies = [(copy, array) for copy, array in zip(used, operands.inputs) if copy is not array]
    given, result, is_copied = arrays[-1], used[-1], used[-1] is not arrays[-1]

    def call() -> np.ndarray:
        for copy, array in copies:
            np.copyto(copy, array)
        out = np.empty(case.shape, out_dtype) if fresh else given
        written = result if is_copied else out
        if run(primitive.handle, written.ctypes.data if fresh else None):
            raise RuntimeError("oneDNN failed")
        if is_copied:
            np.copyto(out, result, casting="unsafe")
        return out

    return call
