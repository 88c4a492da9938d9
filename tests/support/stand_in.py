"""Build and control a test double of an Ascend installation, which `cann_stand_in/stand_in.h` describes.

The double allows tests of the calls to a device on machines without one, with the real names and the real binary
interface. Its results are for tests only.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "cann_stand_in"

BACKWARD = (
    "SoftmaxBackward",
    "LogSoftmaxBackward",
    "ScaledMaskedSoftmaxBackward",
    "FusedLinearCrossEntropyLossGrad",
)
FORWARD = (
    "Softmax",
    "LogSoftmax",
    "ScaledMaskedSoftmax",
    "FusedLinearOnlineMaxSum",
    "FusedCrossEntropyLossWithMaxSum",
)
FUSED = tuple(name for name in (*BACKWARD, *FORWARD) if name.startswith("Fused"))
#: Operators that compute losses of logits, the first two since CANN 8.5.
LOSSES = ("CrossEntropyLoss", "CrossEntropyLossGrad", "SoftmaxCrossEntropyWithLogits")
INDEXING = ("Gather", "ScatterAdd")
SINCE_9_2 = ("CrossEntropySumExpAndIndexLogit",)
#: Operators that the mathematics library has, if the libraries are split.
MATHEMATICS = (
    *("Add", "Adds", "InplaceAdd", "InplaceAdds", "Sub", "Subs", "InplaceSub", "InplaceSubs"),
    *("Mul", "Muls", "InplaceMul", "InplaceMuls", "Div", "Divs", "InplaceDiv", "InplaceDivs"),
    *("Exp", "InplaceExp", "Log", "InplaceLog", "Neg", "InplaceNeg", "Cast", "InplaceCopy"),
    *("InplaceZero", "InplaceFillScalar", "ReduceSum", "MaxDim", "LogSumExp", "Topk", "EqTensor", "InplaceTanh"),
    "Maximum",
)
PRODUCTS = ("Mm", "Matmul", "BatchMatMul", "Addmm")
_NN = (*BACKWARD, *FORWARD, *LOSSES, *INDEXING, *SINCE_9_2, *PRODUCTS)

_STATE = ("state", "memory", "streams", "tensors", "systems", "numbers")
_OPERATORS = (
    *("softmax", "scaled_masked_softmax", "linear_cross_entropy", "cross_entropy"),
    *("elementwise", "reductions", "products", "top_k", "indexing"),
)
_TORCH_OPERATORS = ("nll_loss",)
#: Libraries beyond the runtime with which torch_npu is linked. They are empty, as no function of them is used here.
TORCH_LIBRARIES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")


@dataclass(frozen=True)
class Variant:
    """Describe one kind of installation: its libraries, and what they contain."""

    operators: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"libopapi_nn.so": _NN, "libopapi_math.so": MATHEMATICS}
    )
    defines: tuple[str, ...] = ()  # variant.c is compiled with these macros
    hidden: tuple[str, ...] = ()  # the runtime lacks these functions
    stub: bool = False
    torch: bool = False  # torch_npu can use the variant, whose libopapi.so has torch_npu's own operators


_AGGREGATE = {"libopapi.so": (*_NN, *MATHEMATICS)}
VARIANTS = {
    "split": Variant(),
    "aggregate": Variant(_AGGREGATE),
    "train_infer": Variant(
        {"libaclnn_ops_train.so": BACKWARD, "libaclnn_ops_infer.so": (*FORWARD, *INDEXING, *PRODUCTS, *MATHEMATICS)}
    ),
    # The first family of libraries cannot be loaded, but the second family can.
    "split_without_math": Variant({"libopapi_nn.so": _NN, **_AGGREGATE}),
    "older": Variant(
        {"libopapi.so": tuple(name for name in (*_NN, *MATHEMATICS) if name not in (*FUSED, *LOSSES, *SINCE_9_2))},
        hidden=("aclFinalizeReference", "aclrtCreateContext", "aclrtDestroyContext"),
    ),
    "without_determinism": Variant(hidden=("aclrtCtxSetSysParamOpt",)),
    "without_copies": Variant(hidden=("aclrtMemcpyAsync",)),
    "without_operators": Variant({}),
    "link_time_stub": Variant(stub=True),
    "no_device": Variant(defines=("HAS_DEVICES=false",)),
    "no_driver": Variant(defines=("DEVICE_COUNT_CODE=107001",)),
    "device_lost": Variant(defines=("DEVICE_COUNT_CODE=207004",)),
    "init_fails": Variant(defines=("INIT_CODE=500000",)),
    "no_kernel_path": Variant(defines=("KERNEL_CODE=561107",)),
    "no_kernel_package": Variant(defines=("KERNEL_CODE=561112",)),
    "no_kernels": Variant(defines=("KERNEL_CODE=561003",)),
    "before_9_2": Variant(
        {"libopapi_nn.so": tuple(name for name in _NN if name not in SINCE_9_2), "libopapi_math.so": MATHEMATICS},
        defines=("BEFORE_9_2=true",),
    ),
    "torch_npu": Variant(_AGGREGATE, torch=True),
}

_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wmissing-prototypes")

#: Flags for warnings about the sources.
warnings: list[str] = []


def compiler() -> list[str]:
    """Return the command of the compiler that the extensions are built with."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[:1]


def _run(*command: str | Path) -> None:
    done = subprocess.run([*compiler(), *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the test double does not build:\n{shlex.join(map(str, command))}\n{done.stderr}")
    if done.stderr:
        warnings.append(done.stderr)


@cache
def _root() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cann_stand_in_"))

    def remove(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:  # a child of fork() does not delete the folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@cache
def _object(source: str, *defines: str) -> Path:
    result = Path(_root(), "-".join((source, *defines)) + ".o")
    _run(*_FLAGS, *(f"-D{define}" for define in defines), "-c", SOURCES / f"{source}.c", "-o", result)
    return result


def _link(result: Path, *inputs: str | Path, exports: tuple[str, ...], state: bool = True) -> None:
    """Link a shared library that exports these names ("*" is a wildcard) and finds its neighbours in its folder."""
    script = result.with_suffix(".map")
    script.write_text("{ global: " + "".join(f"{name}; " for name in (*exports, "_no_name_")) + "local: *; };\n")
    neighbours = ("-L", result.parent, "-Wl,-rpath,$ORIGIN", "-lcann_stand_in") if state else ()
    _run(
        *("-shared", "-pthread", "-o", result, "-Wl,--no-as-needed", f"-Wl,-soname,{result.name}"),
        *(f"-Wl,--version-script={script}", *inputs, *neighbours, "-lm"),
    )
    script.unlink()


_RUNTIME = (
    *("aclInit", "aclFinalize", "aclFinalizeReference", "aclGetRecentErrMsg"),
    *("aclrtSetDevice", "aclrtResetDevice", "aclrtGetDevice", "aclrtGetDeviceCount", "aclrtGetSocName"),
    *("aclrtCtxSetSysParamOpt", "aclrtCtxGetSysParamOpt"),
    *("aclrtCreateContext", "aclrtDestroyContext", "aclrtSetCurrentContext", "aclrtGetCurrentContext"),
    *("aclrtSetSysParamOpt", "aclrtGetSysParamOpt", "aclrtCtxSetSysParamOpt", "aclrtCtxGetSysParamOpt"),
    *("aclrtCreateStream", "aclrtDestroyStream", "aclrtSynchronizeStream"),
    *("aclrtMalloc", "aclrtFree", "aclrtMallocHost", "aclrtFreeHost"),
    *("aclrtMemcpy", "aclrtMemcpyAsync", "aclrtMemset"),
)
_NNOPBASE = (
    *("aclCreateTensor", "aclDestroyTensor", "aclSetAclOpExecutorRepeatable", "aclDestroyAclOpExecutor"),
    *("aclCreateIntArray", "aclDestroyIntArray", "aclCreateScalar", "aclDestroyScalar"),
)


@cache
def build(name: str) -> Path:
    """Build a variant into a temporary folder, once per process, and return the folder for ``ASCEND_HOME_PATH``."""
    variant = VARIANTS[name]
    home = Path(_root(), name)
    folder = home / "lib64"
    folder.mkdir(parents=True)
    libraries = {"libascendcl.so": _RUNTIME, "libnnopbase.so": _NNOPBASE}
    for library, operators in variant.operators.items():
        libraries[library] = tuple(f"aclnn{op}{phase}" for op in operators for phase in ("", "GetWorkspaceSize"))
    if variant.stub:
        for library, exports in libraries.items():
            _link(folder / library, _object("link_time_stub"), exports=exports, state=False)
        return home
    state = [_object(source) for source in _STATE] + [_object("variant", *variant.defines)]
    _link(folder / "libcann_stand_in.so", *state, exports=("si_*", "stand_in_*"), state=False)
    if variant.torch:
        libraries |= {
            "libascendcl.so": ("acl*", "rt*", "Msprof*"),
            "libnnopbase.so": ("acl*",),
            "libopapi.so": ("aclnn*",),
        }
    for library, exports in libraries.items():
        if library == "libascendcl.so":
            sources = ("runtime", "context", "events", *(("torch_runtime",) if variant.torch else ()))
        elif library == "libnnopbase.so":
            sources = ("nnopbase", "arguments")
        else:
            sources = (*_OPERATORS, *(_TORCH_OPERATORS if variant.torch else ())) if exports else ()
        inputs: list[str | Path] = [_object(source) for source in sources]
        if library == "libopapi_nn.so":
            inputs.append("-lopapi_math")  # the linker records this library even if it does not exist
            if not (folder / "libopapi_math.so").exists():
                _link(folder / "libopapi_math.so", exports=())
        if variant.torch and library == "libopapi.so":
            inputs.append("-lnnopbase")  # torch_npu also looks for functions in this library
        _link(folder / library, *inputs, exports=tuple(name for name in exports if name not in variant.hidden))
    for library in TORCH_LIBRARIES if variant.torch else ():
        _link(folder / library, "-lascendcl", exports=())
    if "libopapi_math.so" not in variant.operators:
        (folder / "libopapi_math.so").unlink(missing_ok=True)
    return home


@cache
def build_alone() -> Path:
    """Build a single library, separate from the installations, for tests of the test double itself."""
    result = _root() / "libcann_stand_in_alone.so"
    sources = (
        *_STATE,
        "variant",
        "runtime",
        "context",
        "events",
        "nnopbase",
        "arguments",
        *_OPERATORS,
        *_TORCH_OPERATORS,
    )
    _link(result, *(_object(source) for source in sources), exports=("acl*", "stand_in_*"), state=False)
    return result


class StandIn:
    """Control one installation, or the library that `build_alone` builds.

    Installations have libraries of equal names, and therefore share their state. Use only one of them per process.
    """

    LIVE = (
        *("tensors", "arguments", "executors", "streams", "events", "contexts", "device_allocations", "device_bytes"),
        *("host_allocations", "host_bytes", "in_flight"),
    )

    def __init__(self, home: Path) -> None:
        self._state = ctypes.CDLL(str(home if home.suffix == ".so" else home / "lib64" / "libcann_stand_in.so"))
        for function, result, arguments in (
            ("fail", None, (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)),
            ("fail_work", None, (ctypes.c_int64, ctypes.c_int)),
            ("faults_left", ctypes.c_int, ()),
            ("calls", ctypes.c_int64, (ctypes.c_char_p,)),
            ("counter", ctypes.c_int64, (ctypes.c_char_p,)),
            ("violations", ctypes.c_int64, (ctypes.c_char_p, ctypes.c_size_t)),
            ("reset", None, ()),
            ("set_soc", None, (ctypes.c_char_p,)),
            ("set_memory", None, (ctypes.c_int64,)),
            ("set_delay", None, (ctypes.c_int,)),
            ("set_varying", None, (ctypes.c_int,)),
        ):
            symbol = getattr(self._state, f"stand_in_{function}")
            symbol.restype, symbol.argtypes = result, arguments

    def fail(self, function: str, nth: int = 1, code: int = 500000) -> None:
        """Let the `nth` call of a function fail.

        A negative number lets all calls fail from call ``-nth`` on, and 0 lets all calls fail. "*" is any function.
        """
        self._state.stand_in_fail(function.encode(), nth, code)

    def fail_work(self, nth: int = 1, code: int = 507015) -> None:
        """Let the work of the `nth` operator that is put on a stream fail. The next wait returns the code."""
        self._state.stand_in_fail_work(nth, code)

    def faults_left(self) -> int:
        return self._state.stand_in_faults_left()

    def calls(self, function: str = "*") -> int:
        """Return the number of calls since the last reset."""
        return self._state.stand_in_calls(function.encode())

    def counter(self, name: str) -> int:
        value = self._state.stand_in_counter(name.encode())
        if value < 0:
            raise KeyError(name)
        return value

    def live(self) -> dict[str, int]:
        """Return the numbers of existing objects that should be destroyed in the end, without zeros."""
        return {name: count for name in self.LIVE if (count := self.counter(name))}

    def violations(self) -> list[str]:
        """Return the rules that were broken since the last reset."""
        text = ctypes.create_string_buffer(1 << 21)
        self._state.stand_in_violations(text, len(text))
        return text.value.decode().splitlines()

    def reset(self) -> None:
        """Clear faults, violations and counts of calls, but keep all objects."""
        self._state.stand_in_reset()

    def set_soc(self, name: str) -> None:
        self._state.stand_in_set_soc(name.encode())

    def set_memory(self, bytes_per_device: int) -> None:
        self._state.stand_in_set_memory(bytes_per_device)

    def set_delay(self, microseconds: int) -> None:
        """Set the time that an idle stream waits before it starts new work."""
        self._state.stand_in_set_delay(microseconds)

    def set_varying(self, whether: bool) -> None:
        """Set whether operators that are not deterministic by default change their bits in every other launch."""
        self._state.stand_in_set_varying(whether)
