"""Cases that are measured, and cases that the cost model computes."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A linear cross-entropy whose vocabulary entries, or whose tokens, are split over ranks."""

    shape: tuple[int, int, int]  #: (BT, V, H)
    dtype: str
    split: str  #: what is split: "vocabulary" or "tokens"

    @property
    def flops(self) -> float:
        """Return the number of floating-point operations of the three products on one rank."""
        bt, v, h = self.shape
        return 6.0 * bt * v * h

    @property
    def split_flops(self) -> float:
        """Return the number of operations of all ranks together, if 16-bit logits do not fit into the workspace."""
        return self.flops if self.dtype in ("float32", "float64") else self.flops * 4 / 3

    @property
    def summed(self) -> int:
        """Return the number of elements of the gradient that is summed over the ranks."""
        bt, v, h = self.shape
        return (bt if self.split == "vocabulary" else v) * h

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}, {self.split}"


MEASURED = tuple(
    Case(shape, dtype, split)
    for shape in ((1024, 32768, 1024), (4096, 32000, 512))
    for dtype in ("float32", "bfloat16")
    for split in ("vocabulary", "tokens")
)
#: One step of a large model: 16,384 tokens, 151,936 vocabulary entries, 4096 features.
MODELLED = tuple(Case((16384, 151936, 4096), "bfloat16", split) for split in ("vocabulary", "tokens"))
