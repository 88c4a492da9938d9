"""Test the linear operators' memory: calls keep to their bounds, do not leak, and take sizes beyond 2**31."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from linear_samples import GRADIENT, LINEAR, STATISTICS, WHOLE, Shape, problem_of
from processes import SLACK, with_resident
from samples import BFLOAT16, DTYPES, assert_identical

import ascend_grad as ag

#: The vocabulary of a large language model. The logits would take 155 MB.
BT, V, H = Shape(256, 151_936, 64)


@pytest.mark.parametrize(
    ("name", "nbytes"), [*((name, 8 << 20) for name in DTYPES), ("float32", None), ("bfloat16", None)]
)
def test_the_promise_is_kept(name, nbytes, run_script, needs_memory):
    """Each call's peak of resident memory, beyond arguments and results, is at most `workspace_size`."""
    needs_memory(1.5)
    script = f"""
        import numpy as np, ml_dtypes
        import ascend_grad as ag
        dtype, nbytes = np.dtype("{name}"), {nbytes}
        rows, entries, features = {BT}, {V}, {H}
        wide = np.float64 if dtype == np.float64 else np.float32
        x = (np.arange(rows * features).reshape(rows, features) % 7 / 7).astype(dtype)
        w = np.empty((entries, features), dtype)
        w[...] = (np.arange(features) % 5 / 50).astype(dtype)
        target = np.arange(rows) % entries
        outs = x.copy(), w.copy()
        numbers, here = np.ones(rows, wide), np.zeros(rows, bool)
        more = dict(num_threads=2)

        def gradient(**settings):
            arguments = numbers, x, w, here, target
            settings |= dict(logits_max=numbers, sum_exp_logits=numbers, workspace_bytes=nbytes) | more
            return "{GRADIENT}", arguments, settings

        def statistics(**settings):
            return "{STATISTICS}", (x, w, target, 0, entries), settings | more

        def whole(**settings):
            return "{WHOLE}", (x, w, target), settings | dict(workspace_bytes=nbytes) | more

        calls = {{
            "gradient": (gradient(out=outs), 0),
            "one gradient": (gradient(out=(outs[0], None), output_mask=(True, False)), 0),
            "statistics": (statistics(), 0),
            "loss": (whole(return_grad=False), 0),
            "loss and gradients": (whole(), x.nbytes + w.nbytes),
        }}
        few = slice(0, 100)
        ag.linear_cross_entropy(x[few], w[few], target[few], **more)  # libraries and threads have started
        grown = {{}}
        for name, ((operator, arguments, settings), results) in calls.items():
            bound = ag.workspace_size(operator, *arguments, **settings)
            workspace = 2**26 if name == "statistics" else nbytes or 2**26
            accumulator = (dtype.itemsize == 2) * 4 * x.size
            most = workspace + accumulator + 80 * rows
            assert bound <= most, (name, bound, most)
            before = resident("Rss")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM starts again
            result = getattr(ag, operator)(*arguments, **settings)
            grown[name] = (resident("VmHWM") - before - results - bound) / 2**20
            del result
        assert max(grown.values()) < {SLACK} / 2**20, grown
    """
    run_script(with_resident(script))


def test_strange_layouts_are_not_copied(run_script, needs_memory):
    """A transposed, byte-swapped or reversed weight of 150 MB takes no more than the workspace."""
    needs_memory(1.5)
    script = f"""
        import numpy as np
        import ascend_grad as ag
        rows, entries, features = 64, {V}, 256
        memory = np.full((features, entries), 0.001, np.float32)
        x = np.full((rows, features), 0.01, np.float32)
        target = np.zeros(rows, int)
        ag.linear_cross_entropy(x, memory.T[:100], target, num_threads=2)
        for w in (memory.T, memory.view(">f4").T, memory.reshape(entries, features)[::-1]):
            if w.dtype.byteorder == ">":
                memory.byteswap(inplace=True)
            bound = ag.workspace_size("{WHOLE}", x, w, target, output_mask=(True, False), num_threads=2)
            before = resident("Rss")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM starts again
            result = ag.linear_cross_entropy(x, w, target, output_mask=(True, False), num_threads=2)
            grown = resident("VmHWM") - before - bound
            assert np.isclose(result.loss, np.log(entries), rtol=1e-4), result.loss
            assert grown < {SLACK}, grown
            if w.dtype.byteorder == ">":
                memory.byteswap(inplace=True)
    """
    run_script(with_resident(script))


def test_a_small_workspace_is_taken_again():
    arguments = problem_of(WHOLE, Shape(100, 300, 20), "float32").arguments
    expected = ag.linear_cross_entropy(**arguments)
    tracemalloc.start()
    try:
        results = ag.linear_cross_entropy(**arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - sum(result.nbytes for result in results) < ag.workspace_size(WHOLE, **arguments) / 2
    for result, right in zip(results, expected, strict=True):
        assert_identical(result, right)


# ---- leaks -----------------------------------------------------------------------------------------------------------


def test_ten_thousand_calls_leave_nothing_behind(run_script):
    script = """
        import functools
        import numpy as np, ml_dtypes
        import ascend_grad as ag

        def calls(backend, count):
            for dtype in count * (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
                wide = np.float64 if dtype == np.float64 else np.float32
                for rows, entries, features in ((3, 5, 4), (20, 130, 33)):
                    x, w = np.ones((rows, features), dtype), np.ones((entries, features), dtype)
                    target, numbers = np.arange(rows) % entries, np.ones(rows, wide)
                    common = {"backend": backend}
                    s = ag.fused_linear_online_max_sum(x, w, target, 0, entries, return_logits=True, **common)
                    _, softmax = ag.fused_cross_entropy_loss_with_max_sum(
                        *s[:3], vocab_parallel_logits=s.vocab_parallel_logits, **common
                    )
                    numbers_of = {"logits_max": s.logits_max, "sum_exp_logits": s.sum_exp_logits}
                    for mode in ({"softmax": softmax}, numbers_of):
                        for out in (None, (x, None), (np.empty((features, rows), np.float32).T, w)):
                            ag.fused_linear_cross_entropy_loss_grad(
                                numbers, x, w, s.target_mask, s.masked_target, **mode, out=out, **common
                            )
                        for bad in (None, [1], x[0], target - 5):
                            try:
                                ag.fused_linear_cross_entropy_loss_grad(
                                    numbers, x, w, np.zeros(rows, bool), bad, **mode, **common
                                )
                            except ag.AscendGradError:
                                pass
                    for reduction in ("mean", "none"):
                        ag.linear_cross_entropy(x, w[::-1], target, reduction=reduction, num_threads=1, **common)
                    ag.explain("linear_cross_entropy", x, w, target)
                    ag.workspace_size("linear_cross_entropy", x, w, target)

        x = np.ones((3, 4), np.float32)
        target = np.zeros(3, int)

        def small(count):
            for _ in range(count):
                ag.linear_cross_entropy(x, x, target)

        leave_nothing(functools.partial(calls, "cpu"), 5, 12, 1 << 20)
        leave_nothing(functools.partial(calls, "reference"), 5, 3, 1 << 20)
        leave_nothing(small, 0, 10_000, 1 << 20)
    """
    run_script(with_resident(script))


@pytest.mark.parametrize("operator", LINEAR)
def test_reference_counts_stay(operator, backend, assert_references_stay):
    function = getattr(ag, operator)
    for dtype in DTYPES:
        problem = problem_of(operator, (6, 50, 7), dtype)
        outs = None
        if operator == GRADIENT:
            outs = tuple(np.empty(problem.arguments[name].shape, np.float32) for name in ("input", "weight"))
        names = list(problem.arguments)
        counted = [*problem.arrays.values(), *(outs or ()), None, True]
        if backend == "cpu":  # NumPy's functions do not count references to its dtypes
            counted += DTYPES.values()

        def calls(problem=problem, outs=outs, names=names):
            function(**problem.arguments, backend=backend)
            if outs:
                function(**problem.arguments, backend=backend, out=outs, num_threads=1)
            for name in names[:5]:
                with contextlib.suppress(ag.AscendGradError):
                    function(**problem.arguments | {name: "spoilt"}, backend=backend)

        assert_references_stay(calls, counted, 50)


def test_a_call_that_fails_for_memory_leaves_everything_as_it_was():
    """A call raises MemoryError if the accumulator of its 16-bit results cannot be allocated."""
    x = np.broadcast_to(DTYPES["bfloat16"].type(1), (3, 2**45))
    problem = problem_of(GRADIENT, (3, 3, 2), "bfloat16").replaced(input=x, weight=x)
    for chosen in ((True, False), (False, True)):
        with pytest.raises(MemoryError):
            ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, output_mask=chosen, backend="cpu")


# ---- more than 2**31 products ----------------------------------------------------------------------------------------


def test_more_than_two_billion_logits(needs_memory):
    """Rows and entries of one feature repeat, so that the sums are multiples of a small problem's sums."""
    needs_memory(1)
    rows, entries = 46_500, 46_500
    assert rows * entries > 2**31
    x, w = np.array([0.5, -1.0, 2.0], np.float32), np.array([0.25, -0.75, 1.0, 0.5], np.float32)
    which_x, which_w = np.arange(rows) % 3, np.arange(entries) % 4
    grad, largest = np.float32([0.5, 1, -0.25]), np.float32([1, 1, 2])
    total = np.float32([3e4, 5e4, 1e5])
    input_grad, weight_grad = ag.fused_linear_cross_entropy_loss_grad(
        grad[which_x],
        x[which_x, None],
        w[which_w, None],
        np.ones(rows, bool),
        np.zeros(rows, np.int32),
        logits_max=largest[which_x],
        sum_exp_logits=total[which_x],
        num_threads=2,
    )
    p = np.exp(np.outer(x, w).astype(np.float64) - largest[:, None]) / total[:, None] * grad[:, None]
    times_x, times_w = np.bincount(which_x), np.bincount(which_w)
    np.testing.assert_allclose(input_grad[:, 0], ((p * w * times_w).sum(1))[which_x], rtol=1e-4)
    np.testing.assert_allclose(weight_grad[:, 0], ((p.T * x * times_x).sum(1))[which_w], rtol=1e-4)


def test_more_than_two_billion_weights(needs_memory):
    """The weight repeats one row, and most of its gradient is 0. Some rows of the results are compared."""
    needs_memory(5)
    entries, features = 2**16 + 3, 2**15
    assert entries * features > 2**31
    line = (np.arange(features) % 16 / 64).astype(BFLOAT16)
    x, w = line[None, ::-1], np.broadcast_to(line, (entries, features))
    out = np.empty((entries, features), BFLOAT16)
    softmax = np.zeros((1, entries), np.float32)
    at = [0, 5, 2**16 - 1, entries - 1]
    softmax[0, at] = [0.5, 0.25, 1.0, 2.0]
    input_grad, _ = ag.fused_linear_cross_entropy_loss_grad(
        np.ones(1, np.float32), x, w, np.ones(1, bool), np.zeros(1, np.int64), softmax=softmax, out=(None, out)
    )
    np.testing.assert_array_equal(input_grad[0], (3.75 * line.astype(np.float64)).astype(BFLOAT16))
    for row in (*at, 1, entries // 2):
        expected = softmax[0, row] * x[0].astype(np.float64)
        np.testing.assert_array_equal(out[row], expected.astype(BFLOAT16))
