"""Provide a test double of hccl: backends of torch.distributed for tensors on the test double of torch_npu.

The backends send tensors by gloo, through the host. Like hccl, they reduce no float64, take no empty tensor, and use
one device in each process. "hccl" takes only tensors on devices. "both" stands for "cpu:gloo,npu:hccl".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

REDUCED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16)


class _Work(dist.Work):
    """Represent the work of an operation. `wait` copies the results to the device in stream order."""

    def __init__(self, work: dist.Work, results: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self._work, self._results = work, results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        for there, here in self._results:
            there.copy_(here)
        return True


class HcclStandIn(ProcessGroup):
    """Represent the group of processes in one of its processes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, kinds: Sequence[str]):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._devices: set[torch.device] = set()
        self._kinds = kinds
        for kind in kinds:
            self._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, self._gloo)

    def _on_the_host(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        assert tensor.device.type in self._kinds, tensor.device
        if tensor.is_cpu:
            return tensor
        assert tensor.numel() > 0
        self._devices.add(tensor.device)
        assert len(self._devices) == 1, self._devices
        return tensor.cpu()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,) = tensors
        host = self._on_the_host(tensor)
        work = self._gloo.allreduce([host], options)
        if host is tensor:
            return work
        assert tensor.dtype in REDUCED, tensor.dtype
        return _Work(work, [(tensor, host)])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> dist.Work:
        (tensor,), (parts,) = inputs, outputs
        host = self._on_the_host(tensor)
        if host is tensor:
            return self._gloo.allgather(outputs, inputs, options)
        received = [torch.empty_like(host) for _ in parts]
        return _Work(self._gloo.allgather([received], [host], options), list(zip(parts, received, strict=True)))

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], options: Any
    ) -> dist.Work:
        host = self._on_the_host(input)
        if host is input:
            return self._gloo.alltoall_base(output, input, output_sizes, input_sizes, options)
        assert output.numel() > 0
        received = torch.empty(output.shape, dtype=output.dtype)
        work = self._gloo.alltoall_base(received, host, output_sizes, input_sizes, options)
        return _Work(work, [(output, received)])


def register() -> None:
    """Register the backends of torch.distributed, "hccl" only if torch_npu is not installed."""
    for name, kinds in {"hccl": ["npu"], "both": ["cpu", "npu"]}.items():
        create: Callable = partial(HcclStandIn, kinds=kinds)
        dist.Backend.register_backend(f"{name}_stand_in", create, devices=kinds)
