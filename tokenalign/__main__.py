"""`python -m tokenalign`, the same as the console script."""

import sys

from tokenalign.cli import main

if __name__ == "__main__":
    sys.exit(main())
