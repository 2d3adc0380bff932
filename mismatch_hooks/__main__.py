"""``python -m mismatch_hooks``."""

import sys

from mismatch_hooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
