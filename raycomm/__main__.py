"""``python -m raycomm``; see `raycomm.cli`."""

from __future__ import annotations

import sys

from raycomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
