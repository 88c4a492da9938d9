"""Offloading to an Ascend NPU.

`libraries` opens a toolkit; `runtime` finds the device, once per process; `array` is an array in device memory;
`session` moves data for one thread; `torch_npu` shares memory with tensors; `quirks` repairs what the device does
differently; `operators` calls it; `limits` is the table of what it takes; `backend` is what dispatch sees.
"""
