"""Offloading to an Ascend NPU.

`libraries` opens a toolkit; `runtime` finds the device, once per process; `session` moves data for one thread; `array`
is an array that lives on the card; `limits` is the table of what the device takes; `quirks` repairs what it does
differently; `operators` calls it.
"""
