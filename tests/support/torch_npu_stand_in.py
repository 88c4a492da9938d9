"""Provide a test double of torch_npu: tensors of type "npu" whose memory is in the test double of a device.

Tests run on torch_npu itself if it is installed (`torch_npu_real`). This module serves all other environments, and
tests that torch_npu refuses over the test double of a device (`torch/test_npu_double.py`, `test_npu_breaks.py`).
Such tests use private formats, which need an older interface of operators, or submit work by themselves.

The tensors are torch's own, with its dispatcher and autograd. This module replaces the layer below, which is
torch_npu's, by Python code. The code behaves like torch_npu in these points:

- Work is first put in a queue on the host. It is submitted to the stream if its results are needed, or if
  ``npu_stream`` is read while the device is torch's current one.
- Operators bind the thread to torch's current device when they end.
- Memory of dropped tensors is reused at once, though work that is under way may still use it. A reader that does not
  follow the order of torch's stream sees wrong data.
- ``__dlpack_device__`` raises, as torch itself does.

Softmax and copies on the device are put in the queue. All other operators wait for the queue and run on the host.
"""

from __future__ import annotations

import ctypes
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch
from acl_client import D2H, H2D, Acl
from dlpack_capsules import EXT_DEVICE, Deleter, DLManagedTensor, DLTensor, capsule_of
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

#: Older versions of torch know no backends that are written in Python.
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

#: Numbers of formats. A new tensor with four dimensions is NCHW, and so on.
NCHW, ND, FRACTAL_NZ, NCDHW = 0, 2, 29, 30
BASE_FORMATS = (NCHW, ND, NCDHW)


class Stream:
    """Represent torch's current stream of one device, with its queue on the host."""

    def __init__(self, double: TorchNpu, device: int):
        self._double, self._device = double, device
        self.queue: list[Callable[[], None]] = []
        self.handle: int | None = None
        self._lock = threading.RLock()  # threads share the stream of a device

    @property
    def npu_stream(self) -> int:
        self._double.current_stream(self._double.npu.current_device()).submit()
        return self._handle()

    def submit(self) -> int:
        """Submit the work in the queue to the stream."""
        with self._lock:
            handle = self._handle()
            queue, self.queue = self.queue, []
            for work in queue:
                work()
            return handle

    def _handle(self) -> int:
        with self._lock:
            if self.handle is None:
                with self._double.on(self._device):
                    self.handle = self._double.acl.stream()
            return self.handle

    def synchronize(self) -> None:
        with self._double.on(self._device):
            self._double.acl.check("aclrtSynchronizeStream", self.submit())


class TorchNpu(types.ModuleType):
    """Replace the module ``torch_npu``. It has no tensors before `bind` gives it an installation."""

    acl: Acl

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.npu = _DeviceModule(self)
        self.streams: dict[int, Stream] = {}
        self._formats: dict[int, int] = {}
        self._blocks: dict[int, tuple] = {}  # the blocks of memory that tensors use
        self._free: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._delete = Deleter(self._deleted)

    def bind(self, home: Path) -> None:
        names = "libascendcl.so", "libnnopbase.so", "libopapi_nn.so"
        if "acl" not in vars(self):
            self.acl = Acl(*(home / "lib64" / name for name in names))

    def rebind(self) -> None:
        """Bind the thread to torch's current device, as the end of an operator does."""
        self.acl.check("aclrtSetDevice", self.npu.current_device())

    def get_npu_format(self, tensor: torch.Tensor) -> int:
        self.rebind()
        usual = {4: NCHW, 5: NCDHW}.get(tensor.dim(), ND)
        return self._formats.get(tensor.untyped_storage().data_ptr(), usual)

    def npu_format_cast(self, tensor: torch.Tensor, format: int) -> torch.Tensor:
        """Return a copy in another format. Between base formats, relabel the tensor and return it."""
        is_base = self.get_npu_format(tensor) in BASE_FORMATS and format in BASE_FORMATS
        result = tensor if is_base else tensor.clone()
        self._formats[result.untyped_storage().data_ptr()] = format
        return result

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Bind the thread to a device, and restore its previous binding afterwards."""
        before = c_void_p()
        is_bound = self.acl.aclrtGetCurrentContext(ctypes.byref(before)) == 0 and before.value
        self.acl.check("aclrtSetDevice", device)
        yield
        if is_bound:
            self.acl.check("aclrtSetCurrentContext", before)

    def current_stream(self, device: int | None = None) -> Stream:
        device = self.npu.current_device() if device is None else device
        return self.streams.setdefault(device, Stream(self, device))

    def new_bytes(self, nbytes: int, device: int) -> torch.Tensor:
        """Return an uninitialised tensor of this number of bytes."""
        size = -(-nbytes // 512) * 512
        free = self._free[device, size]
        if not size:
            address = 0
        elif free:
            address = free.pop()
        else:
            with self.on(device):
                address = self.acl.malloc(size)
        self._formats.pop(address, None)
        shape = (c_int64 * 1)(nbytes)
        tensor = DLTensor(address, EXT_DEVICE, device, 1, 1, 8, 1, shape, None, 0)
        managed = DLManagedTensor(tensor, None, self._delete)
        self._blocks[ctypes.addressof(managed)] = managed, shape, device, size, address
        return torch.from_dlpack(capsule_of(managed))

    def _deleted(self, managed: int) -> None:
        *_, device, size, address = self._blocks.pop(managed)
        if size:
            self._free[device, size].append(address)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the whole storage on the host, viewed as the tensor views it."""
        storage = tensor.untyped_storage()
        host = np.empty(storage.nbytes(), np.uint8)
        self.current_stream(tensor.device.index).synchronize()
        if host.size:
            with self.on(tensor.device.index):
                self.acl.check("aclrtMemcpy", host.ctypes.data, host.size, storage.data_ptr(), host.size, D2H)
        whole = torch.from_numpy(host).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write a copy that `to_host` has made back to the device."""
        storage = tensor.untyped_storage()
        source, size = host.untyped_storage().data_ptr(), storage.nbytes()
        if size:
            with self.on(tensor.device.index):
                self.acl.check("aclrtMemcpy", storage.data_ptr(), size, source, size, H2D)

    def describe(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        room = [storage.nbytes() // tensor.element_size()]
        shape, strides = (tensor.size(), tensor.stride()) if tensor.dim() else ((1,), (1,))
        handle = self.acl.tensor(storage.data_ptr(), shape, dtype, strides, tensor.storage_offset(), room)
        assert handle is not None
        return handle

    def launch(self, name: str, *arguments: torch.Tensor | int, device: int) -> None:
        """Put an operator of the device on the stream."""
        acl = self.acl
        with self.on(device):
            converted = [self.describe(each) if isinstance(each, torch.Tensor) else each for each in arguments]
            code, size, executor = acl.prepare(name, *converted)
            assert code == 0
            workspace = self.new_bytes(size, device)
            acl.executors.remove(executor)
            stream = self.streams[device].handle
            acl.check(f"aclnn{name}", workspace.untyped_storage().data_ptr(), size, executor, stream)
            for each, argument in zip(converted, arguments):
                if isinstance(argument, torch.Tensor):
                    acl.tensors.remove(each)
                    acl.check("aclDestroyTensor", each)

    def release(self) -> None:
        """Free all memory and streams. There must be no tensors.

        Autograd's thread may drop its last tensors after backward has returned. These are waited for.
        """
        deadline = time.monotonic() + 10
        while self._blocks and time.monotonic() < deadline:
            time.sleep(0.001)
        for device, stream in self.streams.items():
            stream.synchronize()
            with self.on(device):
                self.acl.check("aclrtDestroyStream", stream.handle)
            self.acl.streams.remove(stream.handle)
        self.streams.clear()
        assert not self._blocks, [block[2:] for block in self._blocks.values()]
        self.free_blocks()

    def free_blocks(self) -> None:
        """Free unused memory, after the work that may use it has ended."""
        for stream in self.streams.values():
            stream.synchronize()
        for (device, _), blocks in self._free.items():
            with self.on(device):
                for address in blocks:
                    self.acl.check("aclrtFree", address)
                    self.acl.device_memory.remove(address)
        self._free.clear()


class _DeviceModule(types.ModuleType):
    """Replace the module ``torch_npu.npu``, which torch registers as ``torch.npu``."""

    def __init__(self, double: TorchNpu):
        super().__init__("torch_npu.npu")
        self._double = double
        self.current_stream = double.current_stream
        self._of_thread = threading.local()

    def init(self) -> None:
        """Do nothing, as the runtime is initialised already."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return getattr(self._of_thread, "device", 0)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        outer = self.current_device()
        self._of_thread.device = index
        try:
            yield
        finally:
            self._of_thread.device = outer

    def set_device(self, index: int) -> None:
        self._of_thread.device = index

    def memory_allocated(self, index: int) -> int:
        return sum(size for _, _, device, size, _ in self._double._blocks.values() if device == index)

    def empty_cache(self) -> None:
        self._double.free_blocks()

    def synchronize(self, index: int = 0) -> None:
        self._double.current_stream(index).synchronize()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, as random numbers come from the host."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Do nothing, as there is no state."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


# ---- the operators of torch ------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_libraries = []  # libraries exist as long as they are referenced


def register() -> TorchNpu:
    """Make "npu" a type of devices, once per process and before autograd starts a thread for each device."""
    double = TorchNpu()
    backend_registration._setup_privateuseone_for_python_backend("npu", double.npu)
    aten, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend((aten, rest))

    def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        dtype = dtype or torch.get_default_dtype()
        count = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
        index = double.npu.current_device() if device.index is None else device.index
        flat = _aten.view.dtype(double.new_bytes(count * dtype.itemsize, index), dtype)
        double.rebind()
        return _aten.as_strided(flat, size, stride, 0)

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
        return empty_strided(size, like.stride(), dtype, layout, device)

    def copy_on_the_device(source, target):
        host = double.to_host(target)
        host.copy_(double.to_host(source))
        double.to_device(host, target)

    def copy_from(source, target, non_blocking=False):
        if source.device == target.device:
            source, target = source.detach(), target.detach()
            double.current_stream(target.device.index).queue.append(lambda: copy_on_the_device(source, target))
        elif target.device.type == "cpu":
            target.copy_(double.to_host(source))
        else:
            host = double.to_host(target)
            host.copy_(source.cpu())
            double.to_device(host, target)
        double.rebind()
        return target

    def softmax(input, dim, half_to_float):
        result = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        device = input.device.index
        queue = double.current_stream(device).queue
        queue.append(lambda: double.launch("Softmax", input, dim, result, device=device))
        return result

    def arange(end, dtype=None, layout=None, device=None, pin_memory=None):
        return torch.arange(end, dtype=dtype).to(device)

    def on_the_host(operator, *args, **kwargs):
        devices = []

        def down(value):
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                devices.append(value.device)
                return double.to_host(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        host_args, host_kwargs = tree_map(down, (args, kwargs))
        host_args = [  # torch has wrapped numbers in tensors, which become numbers again
            torch.tensor(each) if type(each) is int and str(argument.type) == "Tensor" else each
            for each, argument in zip(host_args, operator._schema.arguments)
        ]
        result = operator(*host_args, **host_kwargs)
        for i, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed, host = (each[i] if i < len(args) else named[argument.name]
                                 for each, named in ((args, kwargs), (host_args, host_kwargs)))  # fmt: skip
                double.to_device(host, changed)
                double.rebind()
                return changed
        double.rebind()
        return tree_map(lambda each: each.to(devices[0]) if isinstance(each, torch.Tensor) else each, result)

    aten.impl("empty_strided", empty_strided, "PrivateUse1")
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("_softmax", softmax, "PrivateUse1")
    for name in ("as_strided", "view", "_reshape_alias", "unfold"):  # these operators access no memory
        operator = getattr(_aten, name).default
        aten.impl(name, lambda *args, op=operator, **kwargs: op.redispatch(_CPU, *args, **kwargs), "PrivateUse1")
    # torch's own kernels of these would resize tensors of the device.
    aten.impl("arange", arange, "PrivateUse1")
    aten.impl("sort.stable", lambda *args, **kwargs: on_the_host(_aten.sort.stable, *args, **kwargs), "PrivateUse1")
    rest.fallback(on_the_host, "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return double
