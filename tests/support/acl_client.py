"""Call the Ascend runtime by ctypes, so that tests of the test double do not need the library's binding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import ml_dtypes
import numpy as np
from stand_in import StandIn

DTYPES = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.int32): 3,
    np.dtype(np.uint8): 4,
    np.dtype(np.int64): 9,
    np.dtype(np.float64): 11,
    np.dtype(np.bool_): 12,
    np.dtype(ml_dtypes.bfloat16): 27,
}
H2H, H2D, D2H, D2D = range(4)

_PHASE_1 = (POINTER(c_uint64), POINTER(c_void_p))
_SIGNATURES = {
    "aclInit": (c_char_p,),
    "aclFinalize": (),
    "aclFinalizeReference": (POINTER(c_uint64),),
    "aclrtSetDevice": (c_int32,),
    "aclrtResetDevice": (c_int32,),
    "aclrtGetDevice": (POINTER(c_int32),),
    "aclrtGetDeviceCount": (POINTER(ctypes.c_uint32),),
    "aclrtGetSocName": (),
    "aclGetRecentErrMsg": (),
    "aclrtCreateContext": (POINTER(c_void_p), c_int32),
    "aclrtDestroyContext": (c_void_p,),
    "aclrtSetCurrentContext": (c_void_p,),
    "aclrtGetCurrentContext": (POINTER(c_void_p),),
    "aclrtCtxSetSysParamOpt": (c_int, c_int64),
    "aclrtCtxGetSysParamOpt": (c_int, POINTER(c_int64)),
    "aclrtCreateStream": (POINTER(c_void_p),),
    "aclrtDestroyStream": (c_void_p,),
    "aclrtSynchronizeStream": (c_void_p,),
    "aclrtSynchronizeDevice": (),
    "aclrtStreamQuery": (c_void_p, POINTER(c_int)),
    "aclrtCreateEventExWithFlag": (POINTER(c_void_p), ctypes.c_uint32),
    "aclrtDestroyEvent": (c_void_p,),
    "aclrtRecordEvent": (c_void_p, c_void_p),
    "aclrtStreamWaitEvent": (c_void_p, c_void_p),
    "aclrtQueryEventStatus": (c_void_p, POINTER(c_int)),
    "aclrtSynchronizeEvent": (c_void_p,),
    "aclrtEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "aclrtSetSysParamOpt": (c_int, c_int64),
    "aclrtGetSysParamOpt": (c_int, POINTER(c_int64)),
    "aclrtMalloc": (POINTER(c_void_p), c_size_t, c_int),
    "aclrtFree": (c_void_p,),
    "aclrtMallocHost": (POINTER(c_void_p), c_size_t),
    "aclrtFreeHost": (c_void_p,),
    "aclrtMemcpy": (c_void_p, c_size_t, c_void_p, c_size_t, c_int),
    "aclrtMemcpyAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p),
    "aclrtMemset": (c_void_p, c_size_t, c_int32, c_size_t),
    "aclCreateTensor": (
        *(POINTER(c_int64), c_uint64, c_int, POINTER(c_int64), c_int64, c_int),
        *(POINTER(c_int64), c_uint64, c_void_p),
    ),
    "aclDestroyTensor": (c_void_p,),
    "aclCreateScalar": (c_void_p, c_int),
    "aclDestroyScalar": (c_void_p,),
    "aclCreateIntArray": (POINTER(c_int64), c_uint64),
    "aclDestroyIntArray": (c_void_p,),
    "aclCreateTensorList": (POINTER(c_void_p), c_uint64),
    "aclDestroyTensorList": (c_void_p,),
    "aclGetViewShape": (c_void_p, POINTER(POINTER(c_int64)), POINTER(c_uint64)),
    "aclSetAclOpExecutorRepeatable": (c_void_p,),
    "aclDestroyAclOpExecutor": (c_void_p,),
}
_OPERATORS: dict[str, tuple] = {
    "SoftmaxBackward": (c_void_p, c_void_p, c_int64, c_void_p),
    "LogSoftmaxBackward": (c_void_p, c_void_p, c_int64, c_void_p),
    "ScaledMaskedSoftmaxBackward": (c_void_p, c_void_p, c_void_p, c_double, c_bool, c_void_p),
    "FusedLinearCrossEntropyLossGrad": (*[c_void_p] * 5, c_float, *[c_void_p] * 5),
    "Softmax": (c_void_p, c_int64, c_void_p),
    "LogSoftmax": (c_void_p, c_int64, c_void_p),
    "ScaledMaskedSoftmax": (c_void_p, c_void_p, c_double, c_bool, c_void_p),
    "FusedLinearOnlineMaxSum": (*[c_void_p] * 3, c_int64, c_int64, *[c_void_p] * 6),
    "FusedCrossEntropyLossWithMaxSum": (*[c_void_p] * 3, c_float, *[c_void_p] * 5),
    "CrossEntropyLoss": (*[c_void_p] * 3, c_char_p, c_int64, c_double, c_double, c_bool, *[c_void_p] * 4),
    "CrossEntropyLossGrad": (*[c_void_p] * 6, c_char_p, c_int64, c_double, c_double, c_void_p),
    "SoftmaxCrossEntropyWithLogits": (*[c_void_p] * 4,),
    "CrossEntropySumExpAndIndexLogit": (*[c_void_p] * 3, c_int64, c_int64, *[c_void_p] * 5),
    "Topk": (c_void_p, c_int64, c_int64, c_bool, c_bool, c_void_p, c_void_p),
    "Sort": (c_void_p, c_bool, c_int64, c_bool, c_void_p, c_void_p),
    "LogSumExp": (c_void_p, c_void_p, c_bool, c_void_p),
    "Cast": (c_void_p, c_int, c_void_p),
    "InplaceCopy": (c_void_p, c_void_p),
    "Exp": (c_void_p, c_void_p),
    "Sub": (*[c_void_p] * 4,),
    "Mul": (*[c_void_p] * 3,),
    "Adds": (*[c_void_p] * 4,),
    "InplaceAdd": (*[c_void_p] * 3,),
    "InplaceMuls": (c_void_p, c_void_p),
    "Add": (*[c_void_p] * 4,),
    "Muls": (*[c_void_p] * 3,),
    "GtTensor": (*[c_void_p] * 3,),
    "SWhere": (*[c_void_p] * 4,),
    "ReduceSum": (c_void_p, c_void_p, c_bool, c_int, c_void_p),
    "MaxDim": (c_void_p, c_int64, c_bool, c_void_p, c_void_p),
    "Mm": (*[c_void_p] * 3, ctypes.c_int8),
    "Cat": (c_void_p, c_int64, c_void_p),
    "Index": (*[c_void_p] * 3,),
    "Gather": (c_void_p, c_int64, c_void_p, c_void_p),
    "ScatterAdd": (c_void_p, c_int64, *[c_void_p] * 3),
    "Maximum": (*[c_void_p] * 3,),
    "MaskedSelect": (*[c_void_p] * 3,),
}


class StatusError(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.code = code


class Acl:
    """Call the runtime's functions by name, or by helpers. `clear` destroys the objects that the helpers made."""

    def __init__(self, *libraries: Path) -> None:
        self._libraries = [ctypes.CDLL(str(library)) for library in libraries]
        for name, arguments in _SIGNATURES.items():
            self._declare(name, *arguments)
        for name, arguments in _OPERATORS.items():
            self._declare(f"aclnn{name}GetWorkspaceSize", *arguments, *_PHASE_1)
            self._declare(f"aclnn{name}", c_void_p, c_uint64, c_void_p, c_void_p)
        self.aclCreateTensor.restype = c_void_p
        for name in ("aclCreateScalar", "aclCreateIntArray", "aclCreateTensorList"):
            if hasattr(self, name):
                getattr(self, name).restype = c_void_p
        self.aclrtGetSocName.restype = self.aclGetRecentErrMsg.restype = c_char_p
        self.tensors: list[int] = []
        self.executors: list[int] = []
        self.streams: list[int] = []
        self.device_memory: list[int] = []
        self.host_memory: list[int] = []

    def _declare(self, name: str, *arguments) -> None:
        for library in self._libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.argtypes = arguments
                setattr(self, name, function)
                return

    def check(self, name: str, *arguments) -> None:
        code = getattr(self, name)(*arguments)
        if code:
            raise StatusError(name, code)

    def _made(self, name: str, kept: list[int], *arguments) -> int:
        handle = c_void_p()
        self.check(name, ctypes.byref(handle), *arguments)
        kept.append(handle.value)
        return handle.value

    def stream(self) -> int:
        return self._made("aclrtCreateStream", self.streams)

    def malloc(self, nbytes: int) -> int:
        return self._made("aclrtMalloc", self.device_memory, nbytes, 0)

    def malloc_host(self, nbytes: int) -> int:
        return self._made("aclrtMallocHost", self.host_memory, nbytes)

    def to_device(self, array: np.ndarray) -> int:
        """Allocate device memory with the values of the array, and return its address."""
        array = np.ascontiguousarray(array)
        address = self.malloc(max(array.nbytes, 1))
        if array.nbytes:
            self.check("aclrtMemcpy", address, array.nbytes, array.ctypes.data, array.nbytes, H2D)
        return address

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        result = np.empty(like.shape, like.dtype)
        if result.nbytes:
            self.check("aclrtMemcpy", result.ctypes.data, result.nbytes, address, result.nbytes, D2H)
        return result

    def tensor(
        self,
        address: int,
        shape: Sequence[int],
        dtype,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        storage: Sequence[int] | None = None,
        code: int | None = None,
    ) -> int | None:
        storage = shape if storage is None else storage
        handle = self.aclCreateTensor(
            (c_int64 * len(shape))(*shape),
            len(shape),
            DTYPES[np.dtype(dtype)] if code is None else code,
            None if strides is None else (c_int64 * len(strides))(*strides),
            offset,
            2,
            (c_int64 * len(storage))(*storage),
            len(storage),
            address,
        )
        if handle is not None:
            self.tensors.append(handle)
        return handle

    def put(self, array: np.ndarray, **settings) -> int:
        """Make a tensor with the values of the array."""
        handle = self.tensor(self.to_device(array), array.shape, array.dtype, **settings)
        assert handle is not None
        return handle

    def prepare(self, name: str, *arguments) -> tuple[int, int, int | None]:
        """Run the first phase, and return its code, the size of the workspace and the executor."""
        size, executor = c_uint64(), c_void_p()
        code = getattr(self, f"aclnn{name}GetWorkspaceSize")(*arguments, ctypes.byref(size), ctypes.byref(executor))
        if code == 0:
            self.executors.append(executor.value)
        return code, size.value, executor.value

    def launch(self, name: str, *arguments, stream: int) -> None:
        """Run both phases. `clear` frees their objects."""
        code, size, executor = self.prepare(name, *arguments)
        if code:
            raise StatusError(f"aclnn{name}GetWorkspaceSize", code)
        self.executors.remove(executor)
        self.check(f"aclnn{name}", self.malloc(size) if size else None, size, executor, stream)

    def compute(self, name: str, *arguments) -> list[np.ndarray]:
        """Run an operator on tensors made from the given arrays, and return the values of all tensors afterwards."""
        arrays, addresses, converted = [], [], []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                arrays.append(argument)
                addresses.append(self.to_device(argument))
                argument = self.tensor(addresses[-1], argument.shape, argument.dtype)
            converted.append(argument)
        stream = self.streams[0] if self.streams else self.stream()
        self.launch(name, *converted, stream=stream)
        self.check("aclrtSynchronizeStream", stream)
        return [self.read(address, array) for address, array in zip(addresses, arrays)]

    def clear(self) -> None:
        for kept, name in (
            (self.executors, "aclDestroyAclOpExecutor"),
            (self.tensors, "aclDestroyTensor"),
            (self.streams, "aclrtSynchronizeStream"),
            (self.streams, "aclrtDestroyStream"),
            (self.device_memory, "aclrtFree"),
            (self.host_memory, "aclrtFreeHost"),
        ):
            for handle in kept:
                getattr(self, name)(handle)
            if name != "aclrtSynchronizeStream":
                kept.clear()


def code_of(acl: Acl, name: str, *arguments) -> int:
    """Return the code of the first phase for these arguments, with arrays as tensors."""
    code, _, _ = acl.prepare(name, *(acl.put(a) if isinstance(a, np.ndarray) else a for a in arguments))
    return code


def broken(double: StandIn, words: str) -> None:
    """Check that the record has exactly one violation, whose text contains these words."""
    violations = double.violations()
    assert len(violations) == 1, violations
    assert words in violations[0]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)
