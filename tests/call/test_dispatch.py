"""Test the choice of a backend: by argument, by `use_backend`, by environment, or automatically, in this order."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from samples import assert_identical

import ascend_grad as ag
from ascend_grad.backends import REGISTRY
from ascend_grad.backends.ascend import runtime
from ascend_grad.backends.base import Unsupported

X = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def no_choice_is_left(nothing_of_the_callers_is_changed):
    yield
    assert ag.explain("softmax", X).reason.startswith("automatic choice")


def chosen() -> str:
    return ag.explain("softmax", X).backend


def test_use_backend_as_a_context_manager():
    assert chosen() == "cpu"
    with ag.use_backend("reference"):
        assert chosen() == "reference"
        with ag.use_backend("cpu"):
            assert chosen() == "cpu"
            with ag.use_backend("auto"):
                assert chosen() == "cpu"
        assert chosen() == "reference"
    assert chosen() == "cpu"


def test_use_backend_as_a_setter():
    def in_a_context_of_its_own():
        ag.use_backend("reference")
        assert chosen() == "reference"
        ag.use_backend("auto")
        assert chosen() == "cpu"
        with ag.use_backend("cpu"):
            ag.use_backend("reference")
            assert chosen() == "reference"
        assert ag.explain("softmax", X).reason == "use_backend; not npu: " + ag.backends()["npu"].reason

    contextvars.copy_context().run(in_a_context_of_its_own)


def test_use_backend_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), ag.use_backend("reference"):
        raise ZeroDivisionError
    assert chosen() == "cpu"


def test_a_choice_can_be_used_again():
    choice = ag.use_backend("reference")
    for _ in range(2):
        with choice:
            assert chosen() == "reference"
        assert chosen() == "cpu"


def test_use_backend_is_local_to_threads_and_contexts():
    seen = []
    with ag.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
        assert contextvars.copy_context().run(chosen) == "reference"
    assert seen == ["cpu"]
    context = contextvars.copy_context()
    context.run(ag.use_backend, "reference")
    assert context.run(chosen) == "reference"
    assert chosen() == "cpu"


def test_one_choice_in_two_threads():
    """Each of two threads returns to its own earlier choice, although the one that enters first also leaves first."""
    choice = contextvars.copy_context().run(ag.use_backend, "reference")
    first_entered, second_entered, first_left = (threading.Event() for _ in range(3))

    def first() -> list[str]:
        ag.use_backend("auto")
        with choice:
            first_entered.set()
            assert second_entered.wait(30)
            seen = [chosen()]
        first_left.set()
        return [*seen, chosen()]

    def second() -> list[str]:
        ag.use_backend("reference")
        assert first_entered.wait(30)
        with choice:
            second_entered.set()
            assert first_left.wait(30)
            seen = [chosen()]
        return [*seen, chosen()]

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(first), pool.submit(second)]
        assert [call.result(60) for call in calls] == [["reference", "cpu"], ["reference", "reference"]]


def test_one_choice_in_many_tasks():
    choice = contextvars.copy_context().run(ag.use_backend, "reference")

    async def work(before: str, turns: int) -> list[str]:
        seen = []
        with ag.use_backend(before):
            for _ in range(3):
                with choice:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    seen.append(chosen())
                seen.append(chosen())
                await asyncio.sleep(0)
        return [*seen, chosen()]

    async def main():
        return await asyncio.gather(work("cpu", 1), work("reference", 3), work("auto", 2))

    for before, seen in zip(("cpu", "reference", "cpu"), asyncio.run(main()), strict=True):
        assert seen == ["reference", before] * 3 + ["cpu"]


def test_a_block_holds_in_the_tasks_that_it_starts():
    """A task has a copy of the context in which it was started. The end of a block does not change its choice."""

    async def main():
        async def work():
            seen.append(chosen())
            await asyncio.sleep(0.01)
            seen.append(chosen())

        seen = []
        with ag.use_backend("reference"):
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
        assert chosen() == "cpu"
        await task
        assert seen == ["reference", "reference"]

    asyncio.run(main())


def test_a_choice_within_itself():
    with ag.use_backend("reference") as choice:
        with ag.use_backend("cpu"):
            with choice:
                with choice:
                    assert chosen() == "reference"
                assert chosen() == "reference"
            assert chosen() == "cpu"
        assert chosen() == "reference"
    assert chosen() == "cpu"


def test_leaving_what_was_not_entered():
    def in_a_context_of_its_own():
        choice = ag.use_backend("reference")
        message = r"use_backend\('reference'\): expected an open `with` block of it in this thread or task, got none"
        with pytest.raises(RuntimeError, match=message):
            choice.__exit__(None, None, None)
        assert chosen() == "reference"  # `use_backend` called as a function has a lasting effect
        with choice:
            pass
        with pytest.raises(RuntimeError, match=message):
            choice.__exit__(None, None, None)
        with choice:
            with pytest.raises(RuntimeError, match=message):
                contextvars.Context().run(choice.__exit__, None, None, None)
            assert chosen() == "reference"
        assert chosen() == "cpu"

    contextvars.Context().run(in_a_context_of_its_own)


def test_blocks_that_end_in_another_order():
    """Blocks in generators may end in any order, since a generator runs in the context of its caller."""

    def generator(name):
        with ag.use_backend(name):
            while True:
                yield chosen()

    first, second = generator("reference"), generator("cpu")
    assert (next(first), next(second), next(first)) == ("reference", "cpu", "cpu")
    first.close()
    assert chosen() == "cpu"
    assert ag.explain("softmax", X).reason == "requested by use_backend"
    second.close()
    assert ag.explain("softmax", X).reason.startswith("automatic choice")


def test_choices_leave_nothing_behind():
    """Repeated choices do not form a chain that keeps earlier choices alive."""
    counts = []

    def in_a_context_of_its_own():
        made = []
        for _ in range(5):
            made.append(weakref.ref(ag.use_backend("reference")))
            with ag.use_backend("cpu"):
                pass
        gc.collect()
        counts.append(sum(each() is not None for each in made))

    contextvars.copy_context().run(in_a_context_of_its_own)
    assert counts == [0]


@pytest.mark.parametrize("name", ["gpu", "", None, 3, ["cpu"]], ids=repr)
def test_use_backend_refuses_other_names_and_types(name):
    message = r"^use_backend: name: expected one of auto, cpu, npu, reference, got "
    with pytest.raises(ag.ParamInvalidError, match=message) as info:
        ag.use_backend(name)
    assert type(info.value) is (ag.ParamInvalidError if isinstance(name, str) else ag.ParamTypeError)


def test_logging_follows_the_levels(caplog):
    """Messages are logged if the level of the library's logger, or else of the root logger, is low enough."""
    logger, root = logging.getLogger("ascend_grad"), logging.getLogger()

    def is_logged() -> bool:
        caplog.clear()
        ag.softmax(X)
        return bool(caplog.records)

    before = root.level
    try:
        assert not is_logged()
        for chosen_logger in (logger, root):
            for _ in range(2):
                chosen_logger.setLevel(logging.DEBUG)
                assert is_logged()
                logging.disable(logging.DEBUG)
                assert not is_logged()
                logging.disable(logging.NOTSET)
                assert is_logged()
                chosen_logger.setLevel(logging.INFO)
                assert not is_logged()
            logger.setLevel(logging.NOTSET)
    finally:
        root.setLevel(before)
        logger.setLevel(logging.NOTSET)
        logging.disable(logging.NOTSET)


def test_a_bad_call_is_bad_on_an_unavailable_backend_too():
    with pytest.raises(ag.ParamInvalidError, match="axis"):
        ag.softmax(X, 2, backend="npu")


def test_the_first_backend_that_takes_the_call_is_chosen(monkeypatch):
    npu = REGISTRY["npu"]
    monkeypatch.setitem(runtime.found, "state", runtime.State((True, "pretended", "")))
    refusal = Unsupported("rank 1 only", ag.ParamInvalidError("rank 1 only", operator="softmax"))
    monkeypatch.setattr(npu, "unsupported_reason", lambda call: None if call.arrays[0].ndim == 1 else refusal)
    monkeypatch.setattr(npu, "run", lambda call, num_threads: "from the device")
    assert ag.explain("softmax", X[0]) == ("npu", "automatic choice")
    assert ag.explain("softmax", X) == ("cpu", "automatic choice; not npu: rank 1 only")
    assert ag.softmax(X[0]) == "from the device"
    assert_identical(ag.softmax(X), ag.softmax(X, backend="cpu"))
    with pytest.raises(ag.ParamInvalidError, match="rank 1 only"):
        ag.softmax(X, backend="npu")


def test_use_backend_entered_late_or_elsewhere():
    """A block uses the choice that its object was made with, whatever was chosen since, in any thread."""
    with ag.use_backend("auto"):
        late = ag.use_backend("reference")
        ag.use_backend("cpu")
        with late:
            assert ag.explain("softmax", [1.0]).backend == "reference"
        assert ag.explain("softmax", [1.0], num_threads=1).reason == "requested by use_backend"
        assert ag.explain("softmax", [1.0]).backend == "cpu"
        seen = []

        def elsewhere():
            with late:
                seen.append(ag.explain("softmax", [1.0]).backend)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == ["reference"]
