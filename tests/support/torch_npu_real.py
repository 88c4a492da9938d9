"""Load the real torch_npu over the test double of a device.

The published wheel finds the double's libraries by their names, and takes the double for a device.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from stand_in import TORCH_LIBRARIES, StandIn, build

IS_INSTALLED = importlib.util.find_spec("torch_npu") is not None
#: The variant of the test double that the tests of tensors need.
VARIANT = "torch_npu" if IS_INSTALLED else "split"


def load(home: Path | None = None) -> None:
    """Import torch and torch_npu over an installation of the test double. The runtime is initialised later."""
    home = home or build(VARIANT)
    for folder in ("runtime", "compiler"):
        (home / folder).mkdir(exist_ok=True)
    os.environ["ASCEND_HOME_PATH"] = os.environ["ASCEND_OPP_PATH"] = str(home)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in ("libascendcl.so", "libopapi.so", *TORCH_LIBRARIES):
        # The loader gives this library to libraries that are loaded later and need one of this name.
        ctypes.CDLL(str(home / "lib64" / name), ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401
    import torch_npu

    os.environ.setdefault("TORCH_ACL_INIT_CONFIG_PATH", str(Path(torch_npu.__file__).parent / "acl_default.json"))


def kept(device: StandIn) -> dict[str, int]:
    """Count the objects on the device that remain after torch has freed unused memory.

    torch_npu makes streams, events and workspaces at first need, and keeps them. Events and bytes are not counted.
    """
    import torch

    for index in range(2):
        torch.softmax(torch.zeros(1, device=f"npu:{index}"), -1).cpu()
        torch.npu.synchronize(index)
    torch.npu.empty_cache()
    return {name: count for name, count in device.live().items() if name not in ("device_bytes", "events")}
