"""The number of threads that a CPU call may use."""

from __future__ import annotations

from . import _threads, arguments, config

#: The number that the environment sets, or None.
FROM_ENVIRONMENT = config.integer("ASCEND_GRAD_NUM_THREADS", 1, arguments.MAX_THREADS)


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads of CPU calls, for the whole process, as in ``ag.set_num_threads(4)``.

    Parameters
    ----------
    num_threads : int or None
        The number, which may exceed the number of cores; None restores the default.

    Raises
    ------
    ParamInvalidError
        161002, if it is neither None nor an int from 1 to 256 (or to the number of cores, if that is larger).

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.set_num_threads(2)
    >>> ag.get_num_threads()
    2
    >>> ag.set_num_threads(None)
    """
    _threads.set_limit(arguments.thread_count(num_threads, "set_num_threads") or FROM_ENVIRONMENT or 0)


def get_num_threads() -> int:
    """Return the number of threads that a large CPU call uses now.

    It is set by `set_num_threads`, otherwise by ``ASCEND_GRAD_NUM_THREADS``. Otherwise it is OpenMP's own number
    (``OMP_NUM_THREADS``, threadpoolctl), but at most the number of cores that the calling thread's team may use.
    ``OMP_THREAD_LIMIT`` limits all of these. The number is 1 while the system refuses to create threads.

    Returns
    -------
    int
        The number, 1 or more.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.get_num_threads() >= 1
    True
    """
    return _threads.default_threads()


set_num_threads(None)
