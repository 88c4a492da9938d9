"""Test a process with two OpenMP libraries, torch's own and the wheel's, and so with two teams of threads.

Both libraries compute, in any order of loading and of computing, and in forked children.
"""

from __future__ import annotations

import pytest

from ascend_grad import _openmp

needs_openmp = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

IMPORTS = {
    "torch first": "import torch, ascend_grad as ag",
    "torch last": "import ascend_grad as ag, torch",
    "torch after a call": "import ascend_grad as ag; ag.softmax([[1.0] * 4096] * 512, num_threads=2); import torch",
}

SETUP = """
    import numpy as np
    from ascend_grad import _openmp, _threads
    _threads.detect_oversubscription(False)
    random = np.random.default_rng(1)
    x = random.standard_normal((512, 4096), np.float32)
    a = torch.from_numpy(x)

    def by_torch():
        return (a @ a.T).sum().item(), torch.softmax(a, 0).numpy()

    def is_right():
        return np.allclose(ag.softmax(x, 0), by_torch()[1], rtol=1e-5)
"""


@pytest.fixture(params=IMPORTS)
def setup(request: pytest.FixtureRequest) -> str:
    return f"\n    {IMPORTS[request.param]}{SETUP}"


@needs_openmp
def test_teams_of_both_in_turns(setup, run_script):
    script = f"""{setup}
    expected = ag.softmax(x, num_threads=1)
    for threads in (2, 3, 4, 2):
        torch.set_num_threads(threads)
        by_torch()
        assert np.array_equal(ag.softmax(x, num_threads=threads), expected)
        assert _openmp.last_team_size() == threads
        assert torch.get_num_threads() == threads
        assert is_right()
    """
    run_script(script)


def test_teams_of_both_at_once(setup, run_script):
    script = f"""{setup}
    from concurrent.futures import ThreadPoolExecutor
    expected, right = ag.softmax(x, num_threads=2), by_torch()[1]
    def ours(_):
        return np.array_equal(ag.softmax(x, num_threads=2), expected)
    def theirs(_):
        return np.array_equal(by_torch()[1], right)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(function, i) for i in range(20) for function in (ours, theirs)]
        assert all(answer.result() for answer in answers)
    """
    run_script(script)


@needs_openmp
def test_a_forked_child_beside_torch(setup, run_script):
    script = f"""{setup}
    import os, signal, warnings
    warnings.simplefilter("ignore")  # of forking where there are threads
    expected = ag.softmax(x, num_threads=2)
    by_torch()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends itself
            right = np.array_equal(ag.softmax(x, num_threads=2), expected)
            os._exit(0 if right and _openmp.last_team_size() == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert is_right()
    """
    run_script(script)


@needs_openmp
def test_one_environment_for_both(setup, run_script):
    script = f"""{setup}
    assert ag.get_num_threads() == torch.get_num_threads() == 1
    by_torch()
    ag.softmax(x)
    assert _openmp.last_team_size() == 1
    """
    run_script(script, OMP_NUM_THREADS="1")


@needs_openmp
def test_threadpoolctl_finds_and_limits_both(setup, run_script):
    pytest.importorskip("threadpoolctl")
    script = f"""{setup}
    from pathlib import Path
    from threadpoolctl import threadpool_info, threadpool_limits
    by_torch(), ag.softmax(x, num_threads=2)
    loaded = {{Path(line.split()[-1]) for line in open("/proc/self/maps") if "gomp" in line.rpartition("/")[2]}}
    found = {{Path(each["filepath"]).resolve() for each in threadpool_info() if each["user_api"] == "openmp"}}
    of_wheel = {{path for path in loaded if path.parent.name == "ascend_grad.libs"}}
    # Modules that were built here may take the library that torch has loaded. A wheel brings its own.
    is_wheel = any(Path(ag.__file__).parents[1].glob("ascend_grad.libs/*"))
    assert loaded and loaded <= found and len(of_wheel) == is_wheel < len(loaded), (loaded, found)
    before = ag.get_num_threads(), torch.get_num_threads()
    with threadpool_limits(1, user_api="openmp"):
        assert ag.get_num_threads() == torch.get_num_threads() == 1
        assert is_right()
    assert (ag.get_num_threads(), torch.get_num_threads()) == before
    """
    run_script(script)
