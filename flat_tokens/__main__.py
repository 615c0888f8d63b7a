"""``python -m flat_tokens``: the same as ``flat-tokens``."""

import sys

from flat_tokens.tools.cli import main

sys.exit(main())
