"""``python -m flat_tokens``: the same as ``flat-tokens``."""

import sys

from flat_tokens.cli import main

sys.exit(main())
