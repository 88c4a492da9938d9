"""List the cases in which the vendor tests the losses of logits on devices: shapes, dtypes, settings, ranges of values.

They are the settings in ``tests/st`` of hicann/ops-nn (August 2026), of the operators CrossEntropyLoss,
CrossEntropyLossGrad and SoftmaxCrossEntropyWithLogits. Some cases call aclnn. The others are made for 950 and call the
kernels without aclnn, whose checks refuse some of these cases. `REFUSED` says which cases, and why.

Three things differ from the vendor's tests. The values are drawn anew. A case keeps its classes, but has only as many
rows as make `MOST_LOGITS` logits, and at least `LEAST_ROWS`. Settings of the z-loss are left out: the vendor's tests
pass arbitrary ones to the loss, which ignores them, and null to the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np

MOST_LOGITS = 2**15
LEAST_ROWS = 2

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_NUMBERS = {"tiny": float(np.finfo(np.float32).tiny), "max": float(np.finfo(np.float32).max), "max16": 255 * 2.0**120}
_NUMBERS |= {f"-{name}": -value for name, value in _NUMBERS.items()}

#: Kernels take what aclnn refuses on all systems, or on some: the status code and the reason.
REFUSED = {
    "int32": (161002, "aclnn documents int32 targets, but 910B and 910_93 have no kernel for them"),
    "ignored": (561002, "910B and 910_93 take no ignoreIndex from C on; such an index ignores nothing"),
    "smoothing": (561002, "aclnn documents 0 alone for the labelSmoothing of a gradient"),
    "broadcast": (161002, "aclnn wants features and labels of equal shapes"),
}

#: Calls of the loss by dtype: N x C. Logits are from -5 to 5 (inf: infinite), weights from 0 to 1, labels are not
#: smoothed (s: they are), the ignored index is -1 or a class. All reductions are tested.
_LOSSES = """
float16
    19x31 4901x1 1872x15 4777x682 2350x1999 6859x91617 6520x129280
float32
    120x27 2805x13 638x67 1590x33 3973x843 5617x863 6534x129280 7376x129280 7814x129280*inf+s
bfloat16
    413x24 83x149 2152x9 7293x461 2956x1324 6667x637 4816x164914 7542x129280+s 7810x129280
"""

#: Kernels of the loss: dtype, that of targets, N x C, reduction, ignored index, label smoothing, logits, weights.
_LOSS_KERNELS = """
bfloat16 int32 75x2101 mean 926 0.6013 -1..1 tiny..tiny
bfloat16 int32 466x8882 none 4846 0.6 2..10 -1..2
bfloat16 int32 79x7742 none 7740 0.8853 -0.01..-0.001 -1..-0.01
bfloat16 int32 2580x2728 none 766 0.31 -3..3 -2..2
bfloat16 int32 2511x2631 none 2089 0.311 -3..3 -2..3
bfloat16 int32 6038x21 none 10 0.1872 -3.05e-05..3.05e-05 -4..4
bfloat16 int32 6584x5288 none 5149 0.9451 tiny..tiny 0..0.001
bfloat16 int32 9125x8706 none 6975 0.546 -0.001..0 -1..-0.01
bfloat16 int64 293x14127 sum 1422 1 -inf..-inf nan..nan
bfloat16 int64 237x29951 sum 8630 0.3613 0.001..0.01 -max..-max
bfloat16 int64 19138x1833 none 702 0.658 -3..3 -2..2
bfloat16 int64 15x7461 none 3533 0.4418 -1..1 1..2
bfloat16 int64 88x18986 none 14343 0.749 -1..-0.01 -2..-1
bfloat16 int64 21x5507 none 4513 0.711 -0.01..0.01 -100..100
bfloat16 int64 160x26494 none 23392 0.4156 max16..max16 -max..-max
bfloat16 int64 50x21616 none 6324 0.6738 0.001..0.01 0.01..1
bfloat16 int32 29x13796 sum 5807 0.2079 nan..nan -
bfloat16 int32 14x7761 sum 3515 0.224 -inf..inf -
bfloat16 int64 2795x2923 sum 2233 0.2653 nan..nan -
bfloat16 int64 1447x1207 mean 247 0.8046 0..0 -
bfloat16 int64 383x4460 sum 3017 0.6217 inf..inf -
bfloat16 int64 1374x1456 none 790 0.6573 0..0 -
float16 int32 446x2929 none 1295 0.215 -inf..-inf nan..nan
float16 int32 88x97 mean 49 0.5064 1..2 -max..max
float16 int32 75x10299 none 7410 0.5906 10..1000 -3.05e-05..3.05e-05
float16 int32 623x2050 none 528 0.4976 -0.01..-0.001 -0.01..0.01
float16 int32 1573x382 none 11 0.8977 -1000..-10 -3.05e-05..3.05e-05
float16 int32 5752x265 none 88 0.4377 -0.01..0.01 -3400..3400
float16 int32 1312x3800 none 1064 0.7212 -65504..65504 0..0.001
float16 int32 163x7374 none 6333 0.421 65504..65504 0.01..1
float16 int64 2378x1228 sum 453 0 0..1 0..1
float16 int64 8000x1035 none 0 0 -2..2 -2..2
float16 int64 4096x1035 mean 0 1 -2..2 -2..2
float16 int64 3903x3518 sum 2733 0.1668 -inf..-inf nan..nan
float16 int64 185x9630 none 6819 0.5998 0.01..1 -1000..-10
float16 int64 2366x676 none 358 0.9856 -0.01..-0.001 -10..-2
float16 int64 2855x438 none 344 0.8198 -1..1 -3..3
float16 int64 546x7749 none 4778 0.1898 -0.0078..0.0078 -tiny..-tiny
float16 int32 40x52211 none 51323 1 0..0 -
float16 int32 2104x843 none 358 0.1514 -200..200 -
float16 int32 4096x1035 none 0 0 -2..2 -
float16 int64 4096x1035 none 0 0 -2..2 -
float16 int64 4096x1035 sum 0 0 -2..2 -
float16 int64 4096x1035 none 0 1 -2..2 -
float16 int64 4096x1000 none 0 0 -2..2 -
float16 int64 9000x276 none 0 0 -2..2 -
float16 int64 85x11663 sum 5858 0.4221 -inf..-inf -
float16 int64 301x9246 mean 7341 0.9183 0..0 -
float16 int64 12x38085 sum 20414 0.08707 -inf..inf -
float32 int32 727x409 none 385 0 0..0 -
float32 int32 1212x23 sum -3 0.9761 0..0 -
float32 int32 132x10714 mean 7078 0.08507 -0.001..0 -0.01..-0.001
float32 int32 64x65 none 56 0.778 2..10 10..1000
float32 int32 8759x218 none 214 0 -10..-2 -1000..-10
float32 int32 583x1581 none 1142 0.6285 0..0 -3.05e-05..3.05e-05
float32 int32 10x22036 none 18594 0.3883 0..0.001 0.001..0.01
float32 int32 30x10702 none 3144 0.3142 -0.001..0 -0.01..-0.001
float32 int64 128x2247 sum 1990 0.05609 0..0 0..0
float32 int64 4534x52 none 30 0.8351 2..10 10..1000
float32 int64 1024x4095 sum 3 0.7 -2..2 -2..2
float32 int64 1670x622 sum 403 0.4563 inf..inf -inf..inf
float32 int64 1x1 mean -8 0.2182 -0.001..0 2..10
float32 int64 1051x1528 none 1031 0.5044 -100..100 -max..max
float32 int64 88x12641 none 8780 0.8854 2..10 10..1000
float32 int64 8197x87 none 4 0.03505 0..0 -3.05e-05..3.05e-05
bfloat16 int64 1x1 none -2 0.5361 -3.05e-05..3.05e-05 0.01..1
float32 int64 3x3 none 0 0.7611 -tiny..-tiny tiny..tiny
float32 int64 5x6 none -100 0 -2..2 -2..2
float32 int64 5x6 none 3 1 -2..2 -2..2
float32 int64 7x15 none 0 0.3811 -10..-2 -1000..-10
bfloat16 int64 6x16 none 26 0.4247 2..10 -0.001..0
bfloat16 int64 16x24 none 4 0.07098 0.01..1 -tiny..-tiny
bfloat16 int64 10x27 none -3 0.2931 -inf..inf -inf..-inf
float32 int64 31x24 none 5 0.3011 0..0.001 0.001..0.01
bfloat16 int64 16x44 mean -6 0.646 inf..inf -inf..inf
float16 int64 51x58 none 18 0.5434 2..10 -0.01..-0.001
float32 int32 59x33 sum -10 0.5979 -1..-0.01 -2..-1
float32 int32 2x75 none 27 0.05749 0.01..1 1..2
float32 int64 85x19 sum 12 0.7091 10..1000 -0.001..0
float32 int64 106x96 none 70 0.1048 -1..1 -0.01..0.01
"""

#: Calls of the gradient by dtype and reduction: N x C : ignored index. Log-probabilities are from -10 to 0; upstream
#: gradients and weights are normal, with means from -100 to 100 and deviations from 1 to 25.
_GRADIENTS = """
bfloat16 mean
    1x9:-24 1x8:-98 9x15:-6 9x17:-75 1x16:13 9x9:-8 19x19:-34 16x19:-72 7x1:-62 19x41:2 8x255:5 17x255:165 8x21:-60
    256x8:-75 855x21:-30 255x296:10 967x255:-17 16x131073:84095 131073x17:-12 131073x255:193 255x131073:42130
    255x131073:1627 131073x257:55 131073x485:-12
bfloat16 none
    1x17:8 16x1:-69 8x15:-48 19x19:-7 17x9:-62 257x7:-3 256x16:10 255x17:-70 257x16:-96 15x326:16 256x21:-50
    256x257:241 19x16:-84 255x1:-43 1x131073:31853 131073x15:-76 131073x17:-28 131073x184:160 131073x255:195
bfloat16 sum
    7x9:-15 9x9:-54 8x15:14 8x16:-81 8x17:-34 16x17:-98 17x20:-51 20x19:-2 20x19:-20 20x19:-29 21x21:-12 9x257:139
    257x19:-19 21x256:22 16x255:-31 256x256:93 8x7:-20 1x426:29 131073x257:-88 257x131073:67197 257x131073:112814
    275x131073:762
float16 mean
    8x7:-61 7x16:-77 9x7:-11 21x17:-63 20x7:-20 19x15:-54 16x7:-7 9x255:104 256x16:-3 19x257:224 440x16:-83
    16x816:-56 201x256:18 255x257:161 16x131073:4631 131073x19:-53 19x131073:66355 131073x255:52 256x131073:130211
    256x131073:103307 257x131073:99694
float16 none
    8x8:-51 9x15:-39 20x9:-20 15x21:-31 7x17:-42 19x19:-61 19x20:-92 256x1:-47 255x9:-82 256x9:-92 16x256:-63
    16x257:169 256x20:-1 21x255:185 860x8:-39 19x15:-12 16x984:540 16x20:-70 1x289:270 131073x8:-69 131073x16:-69
    256x131073:45725 362x131073:34081
float16 sum
    1x19:6 8x20:-84 21x17:-93 19x8:-92 1x257:196 256x8:-55 255x15:-37 255x16:-62 17x257:180 17x312:112 20x256:253
    255x255:-75 257x255:180 16x7:-45 255x255:32 255x257:168 20x131073:44892 21x131073:94273 255x131073:30619
    131073x256:-29 131073x255:81 291x131073:128657 353x131073:85765 369x131073:23618
float32 mean
    8x7:-77 15x20:-12 15x9:-93 21x20:-95 17x16:-31 20x21:-14 17x255:137 255x20:-18 256x21:-92 737x8:7
    255x131073:126742 131073x257:0
float32 none
    7x1:-8 16x1:-8 9x9:1 9x15:-40 21x9:-20 16x17:-9 7x8:-79 17x7:-17 17x8:-38 21x9:-42 1x256:10 17x16:-73 256x1:-4
    7x255:43 956x1:-34 256x9:-18 16x255:-20 256x20:-55 601x9:0 20x20:-4 15x255:222 21x15:-85 7x131073:49851
    131073x8:-87 131073x9:-71 255x131073:62326 256x131073:80509 256x131073:310 256x131073:78314 256x131073:25666
    256x131073:115355 131073x256:-30 131073x256:-91 131073x256:46 257x131073:89203 257x131073:105494 257x131073:5114
    256x131073:26644
float32 sum
    1x9:-48 1x9:-65 17x1:-33 15x1:-83 9x15:-66 21x9:-99 1x9:-63 16x16:-43 17x15:-46 15x19:-30 17x19:-58 19x20:-53
    15x256:193 256x20:-72 8x883:687 15x8:-12 131073x257:150 131073x257:155
"""

#: Calls of the dense loss by dtype: N x C. Logits (z) and labels (q) are from -100 to 100, or have one value.
_DENSE = """
float32
    1x1 1x7:z=nan 8x1 9x1:q=-inf 9x1 1x15:z=-inf 1x16 16x1 17x1 17x1:z=inf 19x1 1x20 21x1 8x7:q=-inf 7x8 8x9:z=-inf
    9x9 16x7 16x8:z=inf 16x8 7x19 9x15 8x17:q=inf 16x9 8x19 19x8 9x17 8x20:z=-inf 8x21 21x8 19x9 9x21 21x9
    15x15:z=inf 15x15 255x1 16x16:z=-inf 1x256 256x1 1x257:q=-inf 16x17 15x19 15x21 16x20 16x21 20x17 19x21 21x19
    20x20 21x20 256x7 256x7:q=inf 257x7 8x255 256x8:q=nan 257x15:z=inf 16x255 255x16 256x16 17x256 17x257 19x255
    19x257 20x257:z=nan 257x20 21x255 256x21 973x8
float16
    1x1 1x7 7x1 1x8 9x1 1x9 16x1 1x16 17x1:q=-inf 1x17 19x1 20x1 1x20 21x1 8x7 7x8 7x8:q=inf 9x7 16x7 7x17 8x16
    8x16:z=inf 8x16:z=-inf 15x9 17x8 16x9 7x21 9x17 8x20 21x8 8x21 9x19 20x9:q=nan 21x9 9x21 15x15 1x256 16x16 1x257
    17x17:q=nan 15x20 16x19 15x21 21x16 20x17 21x17:q=nan 21x17 20x19 19x20 256x8 255x15 15x256 256x17 17x257:z=nan
    257x17 256x19 257x19 255x20 20x257 21x255:q=inf 21x257
bfloat16
    1x1 1x7 1x8 9x1 15x1 1x15 1x16 16x1 1x17:z=inf 17x1 19x1 21x1:z=nan 1x21:q=nan 1x21 9x7 8x8 9x9 7x16:q=inf 7x17
    8x15 8x16 19x7 15x9 20x7 7x20 9x16 9x16:z=nan 7x21 9x17 8x21 9x19:q=-inf 19x9 9x19 9x20 15x15 16x15 255x1 15x17
    17x15 1x256 1x257 16x17 17x16 15x19 16x19 20x16 17x20 20x19 19x21 20x20 20x21 7x256 7x257 257x7 256x8 255x9
    1x3474 255x16 17x255 256x17 19x257 255x20 20x256 257x20 21x257 6828x1 8x2132
"""

#: Kernels of the dense loss: N x C, logits, labels, dtypes (b: bfloat16, h: float16, s: float32).
_DENSE_KERNELS = """
50x1 -2..-1 -0.01..-0.001 bs
103x43 tiny..tiny -1..1 b
103x43 max..max -1..1 b
1x1 1..2 -1..1 b
44x2 -1..1 -1..1 b
41x19 10..1000 0..0 b
1x200 -1..1 -1..1 b
109x1 -1..1 -0.01..0.01 b
230x8 -10..-1 -10..-1 bhs
2x16 -1..0 -1..0 bhs
136x17 -10..-1 -10..-1 bhs
64x10 5..10 -1000..-10 bhs
69x9 0..1 0..1 bhs
300x64 -100..100 -0.001..0 bhs
128x1576 -1..1 -10..-2 b
103x43212 tiny..tiny -1..1 bhs
103x43212 max..max -1..1 b
1x64 -1000..-10 0.01..1 h
84x1 -1..1 1..2 h
48x1 0..0.001 -1..1 h
187x1 -1..1 -65504..65504 h
16x1 -0.01..-0.001 1..2 h
1x192 2..10 -0.0078..0.0078 h
96x80125 10..1000 -1000..-10 hs
92x11223 0.001..0.01 0..0 hs
103x43212 -tiny..-tiny -1..1 hs
103x43212 -max..-max -1..1 hs
103x43 -tiny..-tiny -1..1 s
96x80 10..1000 -1000..-10 s
8x1 -1..1 -1..1 s
3x97 -100..100 -0.001..0 s
1x1 6.1e-05..6.1e-05 0..0 bh
"""

#: Kernels of the dense loss for which one array is broadcast to the other's shape: both shapes, then as above.
_BROADCAST_KERNELS = """
5x67 1x67 -1..1 -1..1 b
1x47 109x1 10..1000 -1..1 b
71x1 1x31 -0.01..-0.001 -1..1 bh
1x64 128x1 -0.01..0.01 0..0.001 bhs
16x11223 1x11223 -2..-1 10..1000 b
47x43001 1x43001 -3.05e-05..3.05e-05 0.01..1 b
41x11221 41x1 -100..100 -1..1 b
1x96000 107x1 -10..-2 -0.001..0 b
32x1 1x48001 -1..1 -0.001..0 bhs
1x96 107x1 -10..-2 -0.001..0 h
1x32213 61x32213 -1..1 0..0 hs
19x1 19x80121 -100..100 -10..-2 hs
1x1 277x70 -1000..-10 -0.1..0.1 h
10x1024 1x1 0..0.001 -100..100 h
128x32768 1x1 -1..1 0..0 h
32x1 1x48 -1..1 -0.001..0 s
47x43 1x43 -3.05e-05..3.05e-05 0.01..1 s
48x1 48x16 -1..-0.01 -1..1 s
7x1 1x47 -1..1 -1..-0.01 s
277x70 1x1 -1000..-10 -0.1..0.1 s
1x1024 131x1 -1..1 10..1000 s
"""


class Loss(NamedTuple):
    dtype: str
    target_dtype: str
    rows: int
    classes: int
    reduction: str
    ignored: int
    smoothing: float
    logits: str
    #: None: there are no weights.
    weights: str | None

    @property
    def refused(self) -> str:
        """Return the reason why aclnn refuses the case, "" if it does not. It is a key of `REFUSED`."""
        return "ignored" if self.ignored >= self.classes else "int32" if self.target_dtype == "int32" else ""


class Gradient(NamedTuple):
    dtype: str
    target_dtype: str
    rows: int
    classes: int
    reduction: str
    ignored: int
    smoothing: float
    log_prob: str
    upstream: str
    weights: str | None

    @property
    def refused(self) -> str:
        return "int32" if self.target_dtype == "int32" else "smoothing" if self.smoothing else ""


class Dense(NamedTuple):
    dtype: str
    shape: tuple[int, int]
    labels_shape: tuple[int, int]
    logits: str
    labels: str

    @property
    def refused(self) -> str:
        return "" if self.shape == self.labels_shape else "broadcast"


def values(rng: np.random.Generator, range_: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Draw values of a range: uniform ones between two numbers, "normal" ones, or one value everywhere."""
    if range_ == "normal":
        return rng.normal(rng.uniform(-100, 100), rng.uniform(1, 25), shape).astype(dtype)
    low, _, high = range_.partition("..")
    a, b = (_NUMBERS.get(each) or float(each) for each in (low, high or low))
    with np.errstate(over="ignore"):
        if np.isinf([a, b]).all() and a != b:
            return rng.choice([a, b, *rng.standard_normal(8)], shape).astype(dtype)
        return (np.full(shape, a) if low == high or not high else rng.uniform(a, b, shape)).astype(dtype)


def shown(case: tuple) -> str:
    """Return the name of a case."""
    return " ".join(str(each) for each in case)


def arrays_of(
    rng: np.random.Generator, case: Loss | Gradient, range_: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return logits or log-probabilities, targets, of which the vendor ignores classes and -1 alone, and weights."""
    rows = values(rng, range_, (case.rows, case.classes), DTYPES[case.dtype])
    target = rng.integers(0, case.classes, case.rows)
    if -1 <= case.ignored < case.classes:
        target[::3] = case.ignored
    return rows, target, None if case.weights is None else values(rng, case.weights, (case.classes,))


def _shape(text: str) -> tuple[int, int]:
    rows, classes = (int(each) for each in text.split("x"))
    return rows, classes


def _kept(rows: int, classes: int) -> int:
    """Return the number of rows that a case keeps."""
    return min(rows, max(LEAST_ROWS, MOST_LOGITS // classes))


def _extents(text: str) -> tuple[int, int]:
    rows, classes = _shape(text)
    return _kept(rows, classes), classes


def _by_title(text: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a table, each with the title of its part."""
    title = ""
    for line in text.strip("\n").splitlines():
        if line.startswith(" "):
            yield from ((title, word) for word in line.split())
        else:
            title = line


def losses() -> Iterator[Loss]:
    for dtype, word in _by_title(_LOSSES):
        extents, *marks = word.replace("*inf", " inf").replace("+s", " s").split()
        rows, classes = _extents(extents)
        logits, smoothing = "inf" if "inf" in marks else "-5..5", 0.375 if "s" in marks else 0.0
        for reduction, ignored in product(("mean", "sum", "none"), (-1, classes // 2)):
            yield Loss(dtype, "int64", rows, classes, reduction, ignored, smoothing, logits, "0..1")
    for line in _LOSS_KERNELS.strip().splitlines():
        dtype, target_dtype, extents, reduction, ignored, smoothing, logits, weights = line.split()
        settings = reduction, int(ignored), float(smoothing), logits, None if weights == "-" else weights
        yield Loss(dtype, target_dtype, *_extents(extents), *settings)


def gradients() -> Iterator[Gradient]:
    for title, word in _by_title(_GRADIENTS):
        dtype, reduction = title.split()
        extents, _, ignored = word.partition(":")
        settings = reduction, int(ignored), 0.0, "-10..-1e-9", "normal", "normal"
        yield Gradient(dtype, "int64", *_extents(extents), *settings)
    # Kernels, of which the vendor tests a part of all combinations.
    reductions = "mean", "sum", "none"
    for dtype, target_dtype, extents in product(DTYPES, ("int64", "int32"), ("2x16", "128x4191")):
        settings = product(reductions, (-100, 0), (0.0, 0.3), ("-2..2",), ("-2..2",), ("0..1", None))
        for each in settings:
            yield Gradient(dtype, target_dtype, *_extents(extents), *each)
        if extents == "2x16":
            for reduction, (log_prob, upstream) in product(
                reductions, (("nan", "nan"), ("-inf", "inf"), ("inf", "-inf..inf"))
            ):
                yield Gradient(dtype, target_dtype, 2, 16, reduction, 0, 0.0, log_prob, upstream, "0..1")


def dense() -> Iterator[Dense]:
    for dtype, word in _by_title(_DENSE):
        extents, *constants = word.split(":")
        ranges = {"z": "-100..100", "q": "-100..100"} | dict(each.split("=") for each in constants)
        yield Dense(dtype, _extents(extents), _extents(extents), ranges["z"], ranges["q"])
    letters = {"b": "bfloat16", "h": "float16", "s": "float32"}
    for line in [*_DENSE_KERNELS.strip().splitlines(), *_BROADCAST_KERNELS.strip().splitlines()]:
        *extents, logits, labels, dtypes = line.split()
        shapes = [_shape(each) for each in (extents[0], extents[-1])]
        rows, classes = np.broadcast_shapes(*shapes)
        shapes = [(min(N, _kept(rows, classes)), C) for N, C in shapes]
        for letter in dtypes:
            yield Dense(letters[letter], *shapes, logits, labels)
