"""Break the sharing of memory with torch_npu deliberately, and test that the test doubles catch each break.

As in `tests/npu/test_breaks.py`, a break replaces a few words in a copy of the package. A small check runs on the copy
in a separate process. The check passes on an unbroken copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from broken import problems_of, replace
from torch_npu_stand_in import IS_POSSIBLE

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="this torch knows no backends that are written in Python")

FOLDER = Path("ascend_grad/backends/ascend")


class Break(NamedTuple):
    file: str
    right: str
    wrong: str
    caught: str  # the check's output contains this text if the package has this break


BREAKS = {
    "an address that is not the storage's": Break(
        "torch_npu.py", "_acl.borrowed(storage.data_ptr(),", "_acl.borrowed(tensor.data_ptr(),", "not within one alloc"
    ),
    "room in bytes": Break(
        "torch_npu.py", "storage().nbytes() // tensor.element_size()", "storage().nbytes()", "not within one alloc"
    ),
    "no offset": Break("torch_npu.py", "tensor.storage_offset()", "0", "wrong loss"),
    "strides of a contiguous tensor": Break(
        "quirks.py", "return None if layout is None else", "return None if True else", "wrong softmax"
    ),
    "rows of a strided tensor taken for those of a contiguous one": Break(
        "transfers.py", "        if array.storage.is_contiguous:\n", "        if True:\n", "wrong loss"
    ),
    "rows without the offset": Break(
        "array.py", "layout.offset * self.dtype.itemsize", "0 * self.dtype.itemsize", "wrong loss"
    ),
    "torch is not waited for": Break("torch_npu.py", "runtime.wait_for_torch(", "bool(", "wrong softmax"),
    "a stream of another device": Break(
        "tensor_queue.py", "current_stream(self.device)", "current_stream(1 - self.device)", "raised:"
    ),
    "rows without gradient": Break("tensor_queue.py", "tensor, otherwise)", "tensor, tensor)", "wrong gradient"),
    "gradients of rows that have none": Break(
        "tensor_queue.py", "tensor.masked_fill_(~self._present[:, None], 0)", "pass", "wrong gradient of a row"
    ),
    "targets outside of the weight": Break(
        "tensor_queue.py", "target = self.xp.where(inside & ~elsewhere, target, 0)", "pass", "is not in [0, 130)"
    ),
    "targets outside of the weight that nobody sees": Break(
        "tensor_queue.py", "self.xp.where(inside | elsewhere, grad, NAN)", "grad", "a loss without NaN"
    ),
    "probabilities of the caller's": Break(
        "tensor_queue.py", " tensor = torch.where(", " _ = torch.where(", "an argument was changed"
    ),
    "bits in the other order": Break(
        "tensor_queue.py", "columns[:, bit] * (1 << bit)", "columns[:, bit] * (128 >> bit)", "wrong gradient"
    ),
    "bits beyond the last row": Break(
        "tensor_queue.py", "bitwise_and_((1 << count % 8) - 1)", "bitwise_or_(128)", "wrong mask"
    ),
    "results that go nowhere": Break("calls.py", "out.tensor.copy_(array.tensor)", "pass", "wrong softmax"),
    "tensors in other formats": Break(
        "torch_npu.py", "if tensor_format not in STRIDED_FORMATS:", "if False:", "a private format was taken"
    ),
    "values remembered": Break("array.py", "if not self.storage.is_shared:", "if True:", "values of before"),
    "exchanged memory is used at once": Break(
        "pool.py", "runtime.wait_for_torch(self.block.device)", "pass", "wrong array"
    ),
    "memory that came back is used at once": Break(
        "pool.py", "runtime.wait_for_torch(device)", "pass", "work on another stream"
    ),
    "arrays do not live for a consumer": Break("pool.py", "self._array = array", "pass", "not within one alloc"),
}

CHECK = """
import gc, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
import torch_npu_stand_in
double = torch_npu_stand_in.register()
sys.modules["torch_npu"] = double
torch.manual_seed(0)
import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import session
from stand_in import StandIn

home = Path(sys.argv[2])
double.bind(home)
device = StandIn(home)

def check(what, result, expected):
    if not torch.allclose(result.detach().cpu().double(), expected.detach().double(), rtol=0.02, atol=1e-3):
        print("wrong", what)

def on_tensors():
    x = 5 * torch.randn(40, 70)
    for view in (lambda x: x, lambda x: x[3:, 2:], lambda x: x.T):
        there = torch.softmax(x.to("npu"), -1)
        right = torch.softmax(view(torch.softmax(x, -1)), -1)
        check("softmax", agt.softmax(view(there)), right)
        check("softmax", ag.softmax(view(there), out=torch.zeros_like(right).to("npu")), right)
        pending = torch.softmax(x.to("npu"), -1)
        check("softmax", torch.from_numpy(ag.softmax(npu.asarray(view(pending))).numpy()), right)
    hidden, weight, target = torch.randn(9, 6).half(), torch.randn(130, 6).half(), torch.arange(9) * 7
    target[4] = -100
    right = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target)
    for there in (hidden.T.contiguous().to("npu").T, torch.cat([hidden[:1], hidden]).to("npu")[1:]):
        check("loss", agt.linear_cross_entropy(there, weight.to("npu"), target.to("npu")), right)
        arrays = [npu.asarray(each) for each in (there, weight.to("npu"), target.to("npu"))]
        check("loss", torch.from_numpy(ag.linear_cross_entropy(*arrays).loss.numpy()), right)
    try:
        agt.softmax(double.npu_format_cast(x.to("npu"), 29))
        print("a private format was taken")
    except ag.ParamTypeError:
        pass

def fused():
    hidden, weight = torch.randn(9, 6).half(), torch.randn(130, 6).half()
    target, grad, softmax = torch.arange(9) * 7, torch.randn(9), torch.softmax(torch.randn(9, 130), -1)
    mask = torch.tensor([True, True, False, False, False, True, False, False, False])
    target[0], grad[3], hidden[3] = -5, 0, float("nan")
    there = [each.to("npu") for each in (grad, hidden, weight, mask, target)]
    for probabilities in (softmax, softmax * 0.5):
        on_device = probabilities.to("npu")
        results = ag.fused_linear_cross_entropy_loss_grad(*there, softmax=on_device)
        rights = ag.fused_linear_cross_entropy_loss_grad(*(each.float() if each.dtype == torch.float16 else each
            for each in (grad, hidden, weight, mask, target)), softmax=probabilities)
        for result, right in zip(results, rights):
            check("gradient", result, right)
        if not torch.equal(on_device.cpu(), probabilities):
            print("an argument was changed")
    weight[0] = float("nan")
    there[2] = weight.to("npu")
    if ag.fused_linear_cross_entropy_loss_grad(*there, softmax=on_device)[0][3].cpu().any():
        print("wrong gradient of a row that has none")
    target[1], target[4] = 2**40, 130
    for result in ag.fused_linear_cross_entropy_loss_grad(*there[:4], target.to("npu"), softmax=on_device):
        if not result.cpu().isnan().any():
            print("a loss without NaN")
    found = ag.fused_linear_online_max_sum(*there[1:3], torch.full((9,), -1).to("npu"), 0, 130)
    if found.target_mask.cpu().tolist() != [255, 1]:
        print("wrong mask")

def exchanged():
    x = np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32)
    array = npu.asarray(x)
    tensor = torch.from_dlpack(array)
    tensor.copy_(torch.softmax(tensor, -1))
    twice = torch.softmax(torch.softmax(torch.from_numpy(x), -1), -1)
    check("array", torch.from_numpy(ag.softmax(array).numpy()), twice)
    numbers = npu.asarray(np.arange(5))
    written = torch.from_dlpack(numbers)
    numbers.host_values()
    written.add_(1)
    if numbers.host_values()[0] != 1:
        print("values of before")
    array = npu.asarray(x)
    tensor = torch.from_dlpack(array)
    del array
    npu.release()
    result = torch.softmax(tensor, -1)
    double.npu.current_stream(0).npu_stream
    del tensor
    array = npu.asarray(np.zeros_like(x))
    check("result", result, torch.softmax(torch.from_numpy(x), -1))

def guarded(work):
    try:
        work()
    except BaseException as error:
        print("raised:", repr(error))

npu.device_count()
device.set_delay(50_000)
guarded(on_tensors)
guarded(fused)
guarded(exchanged)
if device.violations():
    print(*device.violations(), sep="\\n")
device.set_delay(0)
gc.collect()
guarded(session.release_all)
guarded(double.release)
if device.live():
    print("left:", device.live())
"""


def test_unbroken_copy_passes(copied_package: Path) -> None:
    assert problems_of(copied_package, CHECK) == ""


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_caught(copied_package: Path, name: str) -> None:
    broken = BREAKS[name]
    replace(copied_package / FOLDER / broken.file, broken.right, broken.wrong)
    assert broken.caught in problems_of(copied_package, CHECK)
