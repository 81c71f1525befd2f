"""Makes the support module of the quantisation tests importable: the tree under tests is not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
