"""docs/families.md says what was recorded and what the files refuse, and covers every family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from weight_sync.config import family_yaml

ROOT = Path(__file__).parents[2]


def test_the_page_of_families_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "docs" / "families.py"), "--check"], check=False)
    assert made.returncode == 0, "run: python docs/families.py"


def test_every_family_file_is_compared_with_all_oracles_or_refused_by_name() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    for file in sorted((ROOT / "conf" / "weight_sync" / "family").glob("[!_]*.yaml")):
        name = file.stem
        if not family_yaml(name).get("tensors"):
            assert f"- {name}: " in page
        else:
            assert f"| {name} | trainer | " in page
            assert f"| {name} | trainer | - |" not in page
