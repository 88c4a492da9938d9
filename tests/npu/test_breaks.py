"""Break the NPU backend deliberately, and test that the test double catches each break.

A break replaces a few words in one file of a temporary copy of the package. The copy's modules are compiled again if
necessary. A small check then runs on the copy in a separate process. The check passes on an unbroken copy, so a failure
shows that the tests over the test double find such an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from broken import compile_module, problems_of, replace


@dataclass(frozen=True)
class Break:
    file: str
    right: str
    wrong: str
    caught: str  # the check's output contains this text if the package has this break
    large: bool = False  # only large arrays show the break

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the compiled modules that have to be built again."""
        of_operators = ("_aclnn",)  # breaks of a header change constants and function types of the operators
        by_suffix = {".py": (), ".h": of_operators, ".pxd": of_operators}
        return by_suffix.get(Path(self.file).suffix, (Path(self.file).stem,))


BREAKS = {
    "arguments of a gradient swapped": Break(
        "pyx/ascend/_aclnn.pyx",
        "grad_output.handle, output.handle, dim, out.handle",
        "output.handle, grad_output.handle, dim, out.handle",
        "wrong result of log_softmax_backward",
    ),
    "largest logit and sum swapped": Break(
        "pyx/ascend/_aclnn.pyx",
        "0.0, maximum, total,\n",
        "0.0, total, maximum,\n",
        "wrong result of fused_linear_cross_entropy_loss_grad",
    ),
    "scale as a float": Break(
        "ascend_grad/_aclnn_types.pxd",  # where Cython finds the declarations of a copy
        "double scale, c_bool",
        "float scale, c_bool",
        "wrong result of scaled_masked_softmax",
    ),
    "wrong constant of bfloat16": Break(
        "include/ascend_grad/acl/types.h", "AG_ACL_BF16 = 27", "AG_ACL_BF16 = 1", "wrong result of softmax"
    ),
    "wrong constant of int64": Break(
        "include/ascend_grad/acl/types.h", "AG_ACL_INT64 = 9", "AG_ACL_INT64 = 3", "wrong result of"
    ),
    "wrong kind of copy": Break(
        "pyx/ascend/_acl.pyx",
        "AG_ACL_DEVICE_TO_HOST, stream",
        "AG_ACL_HOST_TO_DEVICE, stream",
        "is said to be on the device",
    ),
    "no synchronisation": Break(
        "pyx/ascend/_acl.pyx",
        "code = table.aclrtSynchronizeStream(handle)",
        "code = 0",
        "wrong result of",
    ),
    "thread not bound to the device": Break(
        "pyx/ascend/_acl.pyx",
        "code = table.aclrtSetDevice(self.device)",
        "code = 0",
        "no aclrtSetDevice on this thread",
    ),
    "tensors never destroyed": Break(
        "pyx/ascend/_aclnn.pyx",
        "_acl.destroy(<destroyer>_acl.table.aclDestroyTensor",
        "if False: _acl.destroy(<destroyer>_acl.table.aclDestroyTensor",
        "left: {'tensors': ",
    ),
    "executor used again after the second phase": Break(
        "pyx/ascend/_aclnn.pyx",
        "self.handle = NULL  # consumed by the call, also where it fails",
        "pass",
        "an executor: a executor that was used up",
    ),
    "executor of a failed first phase used": Break(
        "pyx/ascend/_aclnn.pyx",
        "self.handle = NULL  # whatever stage 1 left there is not to be used",
        "pass",
        "not an executor: an address that was never given out",
    ),
    "executor left behind by a failure between the phases": Break(
        "pyx/ascend/_aclnn.pyx",
        "_acl.destroy(<destroyer>_acl.table.aclDestroyAclOpExecutor",
        "if False: _acl.destroy(<destroyer>_acl.table.aclDestroyAclOpExecutor",
        "left: {'executors': ",
    ),
    "device memory never freed": Break(
        "pyx/ascend/_acl.pyx",
        "destroy_on(self.device, <destroyer>table.aclrtFree, ",
        "if False: destroy_on(self.device, <destroyer>table.aclrtFree, ",
        "'device_allocations'",
    ),
    "stream never destroyed": Break(
        "pyx/ascend/_acl.pyx",
        "destroy_on(self.device, <destroyer>table.aclrtDestroyStream, ",
        "if False: destroy_on(self.device, <destroyer>table.aclrtDestroyStream, ",
        "'streams'",
    ),
    "failures not looked at": Break(
        "pyx/ascend/_aclnn.pyx",
        "_acl.check(status, NAMES[self.operator])",
        "pass",
        "a failure of aclnnSoftmax went unnoticed",
    ),
    "workspace too small": Break(
        "ascend_grad/backends/ascend/queue.py",
        "self.workspace(size) if size else None",
        "None if size else None",
        "the workspace is too small",
    ),
    "staging memory written while a copy reads it": Break(
        "ascend_grad/backends/ascend/transfers.py",
        "        if self._head + nbytes > self._bytes.size:\n            self.synchronize()\n",
        "        if self._head + nbytes > self._bytes.size:\n            self._head = 0\n",
        "wrong result of large softmax",
        large=True,
    ),
    "probabilities of the caller destroyed": Break(
        "ascend_grad/backends/ascend/array_queue.py",
        "return self._queue.copied(there) if is_overwritten and there is array else there",
        "return there",
        "an argument of fused_linear_cross_entropy_loss_grad was changed",
    ),
    "absent rows not left out": Break(
        "ascend_grad/backends/ascend/array_queue.py",
        "is_complete = present.size == count and bool(np.all(present))",
        "is_complete = True",
        "wrong result of fused_linear_cross_entropy_loss_grad",
    ),
    "bits after the last row left dirty": Break(
        "ascend_grad/arrays.py",
        "    if count % 8:\n",
        "    if False:\n",
        "wrong result of fused_linear_online_max_sum",
    ),
    "memory of a result on the device reused for the next call": Break(
        "ascend_grad/backends/ascend/session.py",
        "                    if not allocation.kept:\n",
        "                    if True:\n",
        "was freed",
    ),
    "block of the pool lent twice": Break(
        "ascend_grad/backends/ascend/pool.py",
        "                self._blocks.remove(best)\n",
        "                pass\n",
        "wrong result of",
    ),
    "block of the pool smaller than what is asked for": Break(
        "ascend_grad/backends/ascend/pool.py",
        "if size <= block.size <= 2 * size]",
        "if block.size <= 2 * size]",
        "bytes into 512",
    ),
    "memory given back twice": Break(
        "ascend_grad/backends/ascend/pool.py",
        'block, self.block = getattr(self, "block", None), None',
        'block = getattr(self, "block", None)',
        "wrong result of",
    ),
    "memory that a stream of the caller's uses goes to other work": Break(
        "ascend_grad/backends/ascend/pool.py",
        "        if self._queued_on is not None and self._queued_on.is_pending:",
        "        if False:",
        "stream",
    ),
    "arrays that a stream of the caller's works on are used at once": Break(
        "ascend_grad/backends/ascend/pool.py",
        "                if other is None or other is session:\n",
        "                if True:\n",
        "stream",
    ),
    "foreign targets left in place": Break(
        "ascend_grad/backends/ascend/array_queue.py",
        "if np.any(elsewhere & ((values < 0) | (values >= extent))):",
        "if False:",
        "of row",
    ),
    "option of the context not restored": Break(
        "pyx/ascend/_acl.pyx",
        "code = table.aclrtCtxSetSysParamOpt(AG_ACL_DETERMINISTIC, self.outer)",
        "code = 0",
        "0 operators should be deterministic, not 1",
    ),
    "option of the context set too late": Break(
        "ascend_grad/backends/ascend/queue.py",
        "            with determinism.guard(self.device, self.determinism_level):\n"
        "                executor = getattr(_aclnn, operator)(*converted)\n",
        "            executor = getattr(_aclnn, operator)(*converted)\n"
        "            with determinism.guard(self.device, self.determinism_level):\n",
        "1 operators should be deterministic, not 0",
    ),
    "vector and probabilities swapped": Break(
        "ascend_grad/backends/ascend/cross_entropy.py",
        '"softmax_backward", vector, p, 1',
        '"softmax_backward", p, vector, 1',
        "wrong result of cross_entropy_hvp",
    ),
    "gradient below a softcap without the vector": Break(
        "ascend_grad/backends/ascend/cross_entropy.py",
        'queue.launch("inplace_mul", gradient, vector)',
        'queue.launch("inplace_mul", vector, gradient)',
        "wrong result of cross_entropy_hvp",
    ),
    "another value of the option": Break(
        "pyx/ascend/_acl.pyx",
        "code = table.aclrtCtxSetSysParamOpt(AG_ACL_DETERMINISTIC, self.level)",
        "code = table.aclrtCtxSetSysParamOpt(1, self.level)",
        "1 operators should be deterministic, not 0",
    ),
}

#: A program that checks every operator on arrays of host and device, failures and threads, and prints errors.
CHECK = """
import ctypes, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
import ascend_grad as ag
from ascend_grad import npu
from linear_samples import GRADIENT, LINEAR, problem_of
from samples import MASKED, OPERATORS, random_problem
from stand_in import StandIn

device = StandIn(Path(sys.argv[2]))
device.set_delay(5000)

def calls():
    for name in OPERATORS:
        problem = random_problem(name, (1, 2, 3, 5) if name in MASKED else (3, 7), "bfloat16")
        yield name, problem.arrays, problem.settings
    for name in LINEAR:
        for mode in ("stored", "recomputed")[: 1 + (name == GRADIENT)]:
            settings = {"mode": mode} if name == GRADIENT else {}
            arguments = problem_of(name, (9, 130, 4), "bfloat16", **settings).arguments
            if name == GRADIENT:  # with a row that is absent, and without
                yield name, (), arguments | {"grad": np.ones(9, np.float32)}
                arguments = arguments | {key: np.array(arguments[key]) for key in ("grad", "input")}
                arguments["grad"][2], arguments["input"][2] = 0, np.nan
            yield name, (), arguments
    x, vector = np.random.default_rng(0).standard_normal((2, 9, 5)).astype(np.float32)
    for options in ({}, {"softcap": 2.0, "lse_square_scale": 0.1}):
        yield "cross_entropy_hvp", (x, np.arange(9) % 5, vector), {"reduction": "sum", **options}

def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)

def there(argument):
    return npu.asarray(argument) if isinstance(argument, np.ndarray) else argument

def back(argument):
    return argument.numpy() if isinstance(argument, npu.DeviceArray) else argument

def check(name, positional, named):
    expected = as_tuple(getattr(ag, name)(*positional, **named, backend="reference"))
    before = [np.array(a) for a in (*positional, *named.values()) if isinstance(a, np.ndarray)]
    for place in (lambda x: x, there):
        moved, moved_named = [place(a) for a in positional], {k: place(a) for k, a in named.items()}
        results = [back(a) for a in as_tuple(getattr(ag, name)(*moved, **moved_named, backend="npu"))]
        after = [back(a) for a in (*moved, *moved_named.values()) if isinstance(a, np.ndarray | npu.DeviceArray)]
        for one, other in zip(before, after):
            if one.tobytes() != other.tobytes():
                print(f"an argument of {name} was changed")
        for result, right in zip(results, expected):
            if right is None:
                continue
            exact = right.dtype == np.uint8
            result, right = (np.asarray(a, np.float64) for a in (result, right))
            if not np.allclose(result, right, rtol=0 if exact else 0.05, atol=0 if exact else 0.02):
                print(f"wrong result of {name}")

def must_fail(function, nth):
    device.fail(function, nth, 507899)
    try:
        ag.softmax(np.ones(5, np.float32), backend="npu")
    except ag.AclError as error:
        assert error.code == 507899, error
    else:
        print(f"a failure of {function} went unnoticed")

def launch_deterministically(mode):
    before = device.counter("deterministic_launches")
    with npu.use_deterministic(mode):
        ag.softmax(np.ones(5, np.float32), backend="npu")
    launched = device.counter("deterministic_launches") - before
    if launched != mode:
        print(f"{int(mode)} operators should be deterministic, not {launched}")

def work():
    for call in calls():
        check(*call)
    launch_deterministically(True)
    launch_deterministically(False)
    npu.release()
    on_a_stream()
    npu.release()
    must_fail("aclrtMalloc", 3)  # the workspace, between the two phases
    must_fail("aclnnSoftmaxGetWorkspaceSize", 1)
    must_fail("aclnnSoftmax", 1)
    if sys.argv[3] == "large":
        large()
    npu.release()

def on_a_stream():
    runtime, handle = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
    runtime.aclrtSetDevice(0)
    runtime.aclrtCreateStream(ctypes.byref(handle))
    x = np.linspace(-2, 2, 64 * 65, dtype=np.float32).reshape(64, 65)
    device.set_delay(50_000)
    for uses_memory in (True, False):
        with npu.stream(handle.value):
            y = ag.softmax(npu.asarray(x))
        if uses_memory:
            npu.asarray(np.zeros_like(x))  # not in that of the argument before, which is in use
        if not np.allclose(y.numpy(), ag.softmax(x, backend="reference")):
            print("wrong result on a stream")
    del y
    npu.synchronize()
    device.set_delay(5000)
    runtime.aclrtDestroyStream(handle)

def large():
    # More than the staging memory holds, on a device that is slower than the host.
    x = np.zeros((1200, 4096), np.float32)
    x[:, 7] = np.arange(1200)
    device.set_delay(400_000)
    if not np.allclose(ag.softmax(x, backend="npu")[::100, 7], ag.softmax(x[::100], backend="reference")[:, 7]):
        print("wrong result of large softmax")
    device.set_delay(5000)

def guarded():
    try:
        work()
    except Exception as error:
        print("raised:", repr(error))

guarded()
thread = threading.Thread(target=guarded)
thread.start()
thread.join()
if device.violations():
    print(*device.violations(), sep="\\n")
if device.live():
    print("left:", device.live())
"""


def test_unbroken_copy_passes(copied_package: Path) -> None:
    for module in ("_acl", "_aclnn"):
        compile_module(copied_package, module)
    assert problems_of(copied_package, CHECK, "large") == ""
    assert problems_of(copied_package, CHECK, "small") == ""


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_caught(copied_package: Path, name: str) -> None:
    broken = BREAKS[name]
    replace(copied_package / broken.file, broken.right, broken.wrong)
    for module in broken.modules:
        compile_module(copied_package, module)
    problems = problems_of(copied_package, CHECK, "large" if broken.large else "small")
    assert problems, "nothing was caught"
    assert broken.caught in problems
