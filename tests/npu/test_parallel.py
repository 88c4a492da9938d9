"""Test a vocabulary that is split over two devices, with a separate process for each device."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from parallel_samples import of_tokens, of_vocabulary, whole
from stand_in import build

PROGRAM = """
    import pickle, sys
    from pathlib import Path

    import ascend_grad as ag
    from ascend_grad import npu
    from parallel_samples import tokens_rank, vocabulary_rank, whole
    from socket_rank import SocketRank
    from stand_in import StandIn

    folder, home, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    comm = SocketRank(int(sys.argv[4]), rank)
    assert npu.get_device() == rank
    stand_in = StandIn(home)
    outcomes = {}
    for dtype in ("float16", "bfloat16"):
        for share in (True, False, "scatter"):
            outcomes[dtype, share] = vocabulary_rank(
                whole((33, 300, 17), dtype), [0, 130, 300], comm, reduce_input_grad=share, backend="npu"
            )
        outcomes[dtype, "tokens"] = tokens_rank(whole((33, 300, 17), dtype), [0, 20, 33], comm, backend="npu")
    outcomes["calls"] = {
        name: stand_in.calls(f"aclnn{name}")
        for name in ("FusedLinearOnlineMaxSum", "FusedLinearCrossEntropyLossGrad")
    }
    try:
        vocabulary_rank(whole((33, 300, 17), "float32"), [0, 130, 300], comm, backend="npu" if rank else "cpu")
    except Exception as error:
        outcomes["error"] = error
    npu.release()
    assert stand_in.violations() == [], stand_in.violations()
    assert stand_in.live() == {}, stand_in.live()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Run one process per device, and return their outcomes."""
    folder, home = tmp_path_factory.mktemp("ranks"), build("split")
    script = folder / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    ends = socket.socketpair()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, folder, home, str(rank), str(end.fileno())],
            pass_fds=[end.fileno()],
            # An emulated Python needs the variables of the emulator.
            env={name: value for name, value in os.environ.items() if name.startswith("QEMU_")}
            | {
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
                "ASCEND_HOME_PATH": str(home),
                "ASCEND_GRAD_DEVICE": str(rank),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, end in enumerate(ends)
    ]
    for end in ends:  # each process then notices the end of the other
        end.close()
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("share", [True, False, "scatter"])
def test_two_devices(device_engine, outcomes, dtype, share):
    for each in of_vocabulary([rank[dtype, share] for rank in outcomes], share):
        if share is False:  # the device rounded each part of the sum
            each = each._replace(input_grad=each.input_grad.astype(outcomes[0][dtype, True].input_grad.dtype))
        device_engine.assert_solved(whole((33, 300, 17), dtype), each)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tokens_on_two_devices(device_engine, outcomes, dtype):
    for each in of_tokens([rank[dtype, "tokens"] for rank in outcomes], "mean"):
        device_engine.assert_solved(whole((33, 300, 17), dtype), each)


def test_the_devices_computed(outcomes):
    """The devices compute statistics and gradients. The host computes the losses from the combined statistics."""
    for rank in outcomes:
        assert set(rank["calls"].values()) == {8}


def test_what_a_device_does_not_take_is_an_error_everywhere(outcomes):
    assert "float32" in str(outcomes[1]["error"])
    assert "rank 1 failed: " in str(outcomes[0]["error"])
