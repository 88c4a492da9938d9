"""Test the functions of `ascend_grad.jax` on meshes of four devices, in a separate process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


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


BAD_TARGET = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ascend_grad.jax as agj

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

def losses(hidden, weight, target):
    found = agj.linear_cross_entropy(hidden, weight, target, reduction="none")
    return jax.lax.psum(found.sum(), "d")[None] if sys.argv[1] == "psum" else found

of_all = jax.shard_map(losses, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"))
try:
    print(jax.jit(of_all)(jnp.eye(4, 3), jnp.ones((5, 3)), jnp.array([0, 1, 2, 9])))
except Exception as error:
    print("raised", error)
"""


@pytest.mark.parametrize("collective", ["none", "psum"])
def test_a_bad_target_on_one_device_never_gives_a_result(collective):
    """Without a collective it is an error. XLA ends a process whose devices wait for the one that found the target."""
    flags = "--xla_force_host_platform_device_count=2 " + " ".join(
        f"--xla_cpu_collective_call_{name}_timeout_seconds=1" for name in ("warn_stuck", "terminate")
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", BAD_TARGET, collective],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if collective == "none":
        assert result.returncode == 0, result.stderr
        assert re.match(
            r"raised .*linear_cross_entropy: target: expected values in \[0, 5\) or -100, got 9 in row 1", result.stdout
        )
    else:
        assert result.returncode == -signal.SIGABRT
        assert not result.stdout
        assert "Termination timeout" in result.stderr
