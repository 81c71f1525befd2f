"""Makes the shared worlds and traps importable under their own name: tests are no package."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("session_support")
