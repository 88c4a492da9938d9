"""Test the functions of `ascend_grad.jax` on meshes of four devices, in a process of its own.

All checks run in one process, as JAX starts slowly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_checks
import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Run all checks, and return what was wrong by the name of the check."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    # "-P": the current folder may be the source tree, whose package has no compiled modules.
    command = [sys.executable, "-P", str(Path(mesh_checks.__file__))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.xdist_group("shard_map")
@pytest.mark.parametrize("name", mesh_checks.CHECKS)
def test_it_computes_as_the_formula_in_jnp(name, found):
    assert not found[name], found[name]
