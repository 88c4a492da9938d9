"""What is measured, and what the model is asked about."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A linear cross-entropy whose words, or whose tokens, are split."""

    shape: tuple[int, int, int]  #: BT, V, H
    dtype: str
    split: str  #: "words" or "tokens"

    @property
    def flops(self) -> float:
        """Of the three products, undivided."""
        bt, v, h = self.shape
        return 6.0 * bt * v * h

    @property
    def split_flops(self) -> float:
        """Of all ranks: in 16 bits they compute the logits twice."""
        return self.flops if self.dtype in ("float32", "float64") else self.flops * 4 / 3

    @property
    def summed(self) -> int:
        """Numbers of the gradient that is summed over the ranks."""
        bt, v, h = self.shape
        return (bt if self.split == "words" else v) * h

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}, {self.split}"


MEASURED = tuple(
    Case(shape, dtype, split)
    for shape in ((1024, 32768, 1024), (4096, 32000, 512))
    for dtype in ("float32", "bfloat16")
    for split in ("words", "tokens")
)
#: One step of a large model: 16,384 tokens at once, a vocabulary of 151,936 words, 4096 features.
MODELLED = tuple(Case((16384, 151936, 4096), "bfloat16", split) for split in ("words", "tokens"))
