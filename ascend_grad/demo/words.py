"""Text as tokens of a word-level vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

#: A word, a number or up to three other characters, each with the blank before it; or blanks and line ends together.
#: Every byte of a text is part of one token.
TOKEN = re.compile(rb" ?(?:[A-Za-z_]\w*|\d+|[^\w\s]{1,3})|\s+")
#: The number of all tokens that are not in the vocabulary.
UNKNOWN = 0


def split(text: NDArray[np.uint8]) -> list[bytes]:
    """Return the tokens of a text, in order."""
    return TOKEN.findall(text.tobytes())


def numbering(tokens: Iterable[bytes], size: int) -> dict[bytes, int]:
    """Return numbers from 1 on for the most frequent tokens, at most ``size`` with the number for unknown tokens."""
    common = Counter(tokens).most_common(size - 1)
    return {token: number for number, (token, _) in enumerate(common, UNKNOWN + 1)}


def numbered(tokens: list[bytes], numbers: dict[bytes, int]) -> NDArray[np.int32]:
    """Return the number of each token."""
    return np.fromiter((numbers.get(token, UNKNOWN) for token in tokens), np.int32, len(tokens))
