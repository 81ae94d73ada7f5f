"""``python -m qwen35_serve`` is ``qwen35-serve``."""

import sys

from .cli import main

sys.exit(main())
