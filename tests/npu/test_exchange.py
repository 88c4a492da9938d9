"""Test the exchange of arrays on the device with other libraries, by DLPack and by sharing memory.

Neither torch nor torch_npu is needed, as this file defines the other library. The other library's tensors have only the
attributes that `ascend_grad` reads of torch_npu's tensors. `tests/torch/test_npu.py` tests torch's own tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dlpack_capsules import EXT_DEVICE, Consumer
from npu_samples import BFLOAT16, COPIES, X, counts
from samples import assert_identical
from stand_in import build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import torch_npu


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", (2, 32)), ("float16", (2, 16)), (BFLOAT16, (4, 16)), ("int64", (0, 64)), ("int32", (0, 32)),
     ("uint8", (1, 8)), ("bool", (6, 8))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)], ids=str)
def test_capsules(shape, dtype, kind, device):
    array = npu.asarray(np.zeros(shape, dtype))
    assert array.__dlpack_device__() == (EXT_DEVICE, 0)
    device.reset()
    for capsule in (array.__dlpack__(), array.__dlpack__(stream=7, max_version=(1, 3), dl_device=(12, 0), copy=False)):
        consumer = Consumer(capsule)
        assert (consumer.tensor.device_type, consumer.tensor.device_id) == (EXT_DEVICE, 0)
        assert (consumer.tensor.code, consumer.tensor.bits, consumer.tensor.lanes) == (*kind, 1)
        assert consumer.numbers("shape") == shape
        steps = np.zeros(shape, np.int8).strides
        assert consumer.numbers("strides") == steps
        assert consumer.tensor.byte_offset == 0
        assert consumer.tensor.data % 64 == 0
        consumer.close()
    assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0)


def test_the_other_device_and_no_elements(device):
    npu.set_device(1)
    try:
        array = npu.asarray(X)
    finally:
        npu.set_device(0)
    consumer = Consumer(array.__dlpack__())
    assert array.__dlpack_device__() == (EXT_DEVICE, consumer.tensor.device_id) == (EXT_DEVICE, 1)
    consumer.close()
    nothing = Consumer(npu.asarray(np.zeros((0, 3), np.float32)).__dlpack__())
    assert (nothing.tensor.data, nothing.numbers("shape")) == (None, (0, 3))
    nothing.close()


def test_what_is_not_exchanged(device):
    array = npu.asarray(X)
    for wrong in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (12, 1)}):
        with pytest.raises(BufferError, match="expected to share the memory of the array's device"):
            array.__dlpack__(**wrong)
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(array)
    with pytest.raises(ag.BackendUnavailableError, match="out: expected an array on the CPU"):
        ag.softmax(X, out=array)


def test_a_consumer_keeps_the_memory(device):
    npu.release()
    before = device.counter("device_allocations")
    for how in ("close", "close elsewhere", "never used"):
        array = npu.asarray(X)
        there = device.counter("device_allocations")
        capsule = array.__dlpack__()
        consumer = None if how == "never used" else Consumer(capsule)
        assert array.storage.is_shared
        del array
        gc.collect()
        npu.release()
        assert device.counter("device_allocations") == before + 1
        assert there > before
        if consumer is None:
            del capsule
        elif how == "close":
            consumer.close()
        else:
            thread = threading.Thread(target=consumer.close)
            thread.start()
            thread.join()
        npu.release()
        assert device.counter("device_allocations") == before


def test_memory_comes_back_to_the_pool(device):
    npu.release()  # `release` frees the blocks of earlier calls
    consumer = Consumer(npu.asarray(X).__dlpack__())
    address = consumer.tensor.data
    thread = threading.Thread(target=consumer.close)
    thread.start()
    thread.join()
    device.reset()
    again = Consumer(npu.asarray(X).__dlpack__())
    assert (again.tensor.data, device.counter("mallocs")) == (address, 0)
    again.close()


def test_values_are_not_remembered_while_others_may_write(device):
    array = npu.asarray(np.arange(5))
    device.reset()
    array.host_values()
    assert device.counter("copies_d2h") == 0
    consumer = Consumer(array.__dlpack__())
    array.host_values()
    array.host_values()
    assert device.counter("copies_d2h") == 2
    consumer.close()
    array.host_values()
    array.host_values()
    assert device.counter("copies_d2h") == 3


REPORT = ("tensors", "executors", "streams", "device_allocations", "initialisations")


def report_of(path: Path) -> dict[str, str]:
    lines = dict(line.split(None, 1) for line in path.read_text().splitlines())
    assert "violation" not in lines, lines["violation"]
    return {name: lines[name] for name in REPORT}


@pytest.mark.parametrize("who", ["both", "the consumer", "the array"])
def test_the_end_of_the_process(who, run_script, tmp_path):
    """At the end of the process all memory is freed except memory that another library holds."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        import numpy as np
        from ascend_grad import npu
        from dlpack_capsules import Consumer
        array = npu.asarray(np.zeros(3, np.float32))
        consumer = Consumer(array.__dlpack__())
        if {who!r} == "the consumer":
            del array
        elif {who!r} == "the array":
            consumer.close()
    """
    report = tmp_path / "report"
    run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_REPORT=str(report))
    left = dict.fromkeys(REPORT, "0")
    if who != "the array":
        left |= {"device_allocations": "1", "initialisations": "1"}
    assert report_of(report) == left


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(run_script, tmp_path):
    script = f"""
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import npu
        from dlpack_capsules import Consumer
        array = npu.asarray(np.zeros(3, np.float32))
        consumer = Consumer(array.__dlpack__())
        if not (child := os.fork()):
            consumer.close()
            try:
                array.__dlpack__()
            except ag.BackendUnavailableError as error:
                assert "forked" in str(error), error
            else:
                raise SystemExit("no error")
            del array
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        consumer.close()
        assert ag.softmax(array).numpy().sum() > 0.99
    """
    report = tmp_path / "report"
    run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_REPORT=str(report))
    assert report_of(report) == dict.fromkeys(REPORT, "0")


# ---- arrays over memory of another library ---------------------------------------------------------------------------


@dataclass
class Storage:
    array: npu.DeviceArray  # this array owns the storage's memory
    nbytes_: int

    def data_ptr(self) -> int:
        consumer = Consumer(self.array.__dlpack__())
        address = consumer.tensor.data
        consumer.close()
        return address

    def nbytes(self) -> int:
        return self.nbytes_


@dataclass
class Tensor:
    """Represent a tensor on the device, at an offset into a storage."""

    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str = "torch.float32"
    layout: str = "torch.strided"
    device: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(type="npu", index=0))
    requires_grad: bool = False
    is_nested: bool = False
    is_quantized: bool = False

    def is_neg(self) -> bool:
        return False

    def untyped_storage(self) -> Storage:
        return self.storage

    def element_size(self) -> int:
        return 4

    def storage_offset(self) -> int:
        return self.offset

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def is_contiguous(self) -> bool:
        return self.strides == tuple(step // 4 for step in np.empty(self.shape, np.float32).strides)


@pytest.fixture
def other_library(device, monkeypatch):
    """Install the other library's modules. Return the list of the devices whose current streams are requested."""
    runtime = ctypes.CDLL(str(build("split") / "lib64" / "libascendcl.so"))
    assert runtime.aclrtSetDevice(0) == 0
    stream = ctypes.c_void_p()
    assert runtime.aclrtCreateStream(ctypes.byref(stream)) == 0
    asked = []

    class Stream:
        @property
        def npu_stream(self) -> int:
            return stream.value

    def current_stream(device: int) -> Stream:
        asked.append(device)
        return Stream()

    module = SimpleNamespace(current_stream=current_stream, device=contextlib.nullcontext, is_initialized=lambda: True)
    formats = SimpleNamespace(get_npu_format=lambda tensor: 2, npu=module)
    torch = SimpleNamespace(Tensor=Tensor, are_deterministic_algorithms_enabled=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch_npu", formats)
    yield asked
    gc.collect()
    npu.release()
    assert runtime.aclrtDestroyStream(stream) == 0


def test_arrays_over_memory_of_another_library(other_library, device):
    values = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    storage = Storage(npu.asarray(values), 40 * 4 + 3)  # this size is not a multiple of 4 bytes
    for shape, strides, offset in [((3, 4), (8, 2), 5), ((2, 3), (3, 1), 7), ((4, 2), (1, 4), 0), ((3, 5), (0, 1), 9)]:
        tensor = Tensor(storage, shape, strides, offset)
        array = torch_npu.shared_array(torch_npu.tensor_array(tensor, "x", None))
        steps = [4 * step for step in strides]
        right = np.lib.stride_tricks.as_strided(values[offset:], shape, steps)
        device.reset()
        other_library.clear()
        result = ag.softmax(array)
        assert other_library == [0]
        assert counts(device, *COPIES) == dict.fromkeys(COPIES, 0)
        assert_identical(result.numpy(), ag.softmax(right, backend="npu"))
        consumer = Consumer(array.__dlpack__())
        assert consumer.tensor.data == storage.data_ptr() + 4 * offset
        assert (consumer.numbers("shape"), consumer.numbers("strides")) == (shape, strides)
        consumer.close()
        if tensor.is_contiguous():
            assert_identical(array.numpy(), np.ascontiguousarray(right))


def test_none_of_our_own_words_bring_other_libraries_in(run_script):
    script = """
        import sys
        import numpy as np
        from ascend_grad import npu
        npu.asarray(np.zeros(3, np.float32)).__dlpack__()
        npu.release()
        print("torch" in sys.modules, "torch_npu" in sys.modules)
    """
    assert run_script(script, ASCEND_HOME_PATH=str(build("split"))).stdout == "False False\n"
