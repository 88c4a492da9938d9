"""Offloading to an Ascend NPU.

`libraries` opens a toolkit; `runtime` finds the device, once per process; `array` is an array in device memory; `pool`
holds device memory; `transfers` copies arrays; `session` runs the calls of one thread; `threads` has the sessions of
each thread; `torch_npu` shares memory with tensors; `quirks` lists differences from the contract; `queue` is what
`operators` need, for arrays in `array_queue` and `session`, for tensors in `tensor_queue`, for questions in
`workspace`; `limits` is the table of what the device takes; `backend` is what dispatch sees.
"""
