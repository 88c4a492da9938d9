"""Test the functions of `ascend_grad.jax` on meshes of four devices, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_functions_on_meshes_compute_as_the_formulas_in_jnp():
    """All checks run in one process, as JAX starts slowly. Those that fail are named."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    program = Path(__file__).parents[1] / "support" / "mesh_checks.py"
    # "-P": the current folder may be the source tree, whose package has no compiled modules.
    result = subprocess.run([sys.executable, "-P", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n\n".join(f"{name}\n{text}" for name, text in wrong.items())
