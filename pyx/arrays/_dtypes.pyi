from typing import Final

import numpy as np

BFLOAT16: Final[np.dtype]
FLOATING_DTYPES: Final[tuple[np.dtype, ...]]
