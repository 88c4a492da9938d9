"""The real torch_npu over the test double of a device.

Its wheel, as it is published, finds the double's libraries by their names; the device that it then knows is the double.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from stand_in import StandIn, build

IS_INSTALLED = importlib.util.find_spec("torch_npu") is not None
VARIANT = "torch_npu"
_LIBRARIES = (
    "libascendcl.so",
    "libnnopbase.so",
    "libopapi.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)


def load() -> ModuleType:
    """Import torch and torch_npu; the runtime is not initialised yet."""
    home = build(VARIANT)
    for folder in ("runtime", "compiler"):
        (home / folder).mkdir(exist_ok=True)
    os.environ["ASCEND_HOME_PATH"] = os.environ["ASCEND_OPP_PATH"] = str(home)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in _LIBRARIES:
        ctypes.CDLL(str(home / "lib64" / name), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401
    import torch_npu

    os.environ.setdefault("TORCH_ACL_INIT_CONFIG_PATH", str(Path(torch_npu.__file__).parent / "acl_default.json"))
    return torch_npu


def kept(device: StandIn) -> dict[str, int]:
    """What lives on the device when torch has given back the memory that nobody uses.

    Streams and workspaces (of any size) are made at first need, and kept.
    """
    import torch

    for index in range(2):
        torch.softmax(torch.zeros(1, device=f"npu:{index}"), -1).cpu()
        torch.npu.synchronize(index)
    torch.npu.empty_cache()
    return {name: count for name, count in device.live().items() if name != "device_bytes"}
