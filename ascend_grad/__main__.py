"""``python -m ascend_grad`` is the command line ``ascend-grad``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
