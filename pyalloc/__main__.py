"""python -m pyalloc: the same as the `pyalloc` command."""

import sys

from pyalloc.cli import main

sys.exit(main())
