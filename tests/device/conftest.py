"""Makes the double of a GPU importable under its own name, and fixtures: tests are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ipc_sides import sides  # noqa: F401
from ipc_support import gpu  # noqa: F401
