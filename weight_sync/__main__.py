"""`python -m weight_sync`: the same as the command `weight-sync`."""

import sys

from weight_sync.cli import main

sys.exit(main())
