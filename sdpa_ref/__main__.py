"""``python -m sdpa_ref``: the same as ``sdpa-ref``."""

import sys

from sdpa_ref.cli import main

if __name__ == "__main__":
    sys.exit(main())
