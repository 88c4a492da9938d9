"""Division of rows into one range per rank."""

from __future__ import annotations

from ..arguments import integer, shown
from ..errors import ParamInvalidError

_NAME = "parallel.vocab_range"


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """Return a rank's range of the vocabulary, as equal as possible: ``start, stop = vocab_range(V, rank, size)``.

    Parameters
    ----------
    vocab_size : int
        Number of vocabulary entries, 0 or more.
    rank : int
        The rank, in ``[0, size)``.
    size : int
        The number of ranks.

    Returns
    -------
    start, stop : int
        The ids of the rank's entries, the end exclusive. The first ``vocab_size % size`` ranks have one more than the
        others; with fewer entries than ranks the last ranks have none.

    Raises
    ------
    ParamInvalidError
        161002: an argument is out of range (not an int: its subclass `ParamTypeError`).

    Examples
    --------
    >>> from ascend_grad.parallel import vocab_range
    >>> [vocab_range(10, rank, 3) for rank in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    vocab_size, rank, size = (
        integer(value, name, _NAME) for value, name in ((vocab_size, "vocab_size"), (rank, "rank"), (size, "size"))
    )
    if vocab_size < 0:
        raise ParamInvalidError(f"vocab_size: expected 0 or more, got {shown(vocab_size)}", operator=_NAME)
    if size < 1:
        raise ParamInvalidError(f"size: expected 1 or more, got {shown(size)}", operator=_NAME)
    if not 0 <= rank < size:
        raise ParamInvalidError(f"rank: expected an int in [0, {size - 1}], got {shown(rank)}", operator=_NAME)
    least, more = divmod(vocab_size, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)
