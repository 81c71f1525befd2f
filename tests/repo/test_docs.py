"""What the documentation names exists: files, commands, keys; and pages that are made from code are current."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync import schema
from weight_sync.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "integrations/*/*.md", "benchmarks/*.md", "recipes/*.yaml")
    for page in ROOT.glob(pattern)
)
FOLDERS = "docs|tests|benchmarks|conf|integrations|weight_sync|envs|recipes"
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w\.(?:py|md|yaml|jsonl|json|sh|txt|png)\b)|\]\((?!http)([^)#]+)\)")
COMMAND = re.compile(r"python -m weight_sync ([a-z][a-z-]*)")
KEY = re.compile(r"`weight_sync\.((?:verify|recorded|failure|timeouts|costs|budget|observe|transport)\.[a-z_]+)[`=]")
ELSEWHERE = {"docs/advanced/p2p-weight-transfer.md", "recipes/NAME.yaml", "conf/weight_sync/cluster/NAME.yaml"}
"""Files of other projects, and the place of a file to be written."""


def named(page: Path, pattern: re.Pattern[str]) -> list[str]:
    return [next(word for word in match.groups() if word) for match in pattern.finditer(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_command_and_key_that_a_page_names_exists(page: Path) -> None:
    def there(name: str) -> bool:
        return any(list(base.glob(name)) for base in (ROOT, page.parent))

    assert [name for name in named(page, FILE) if name not in ELSEWHERE and not there(name)] == []
    assert [name for name in named(page, COMMAND) if name not in COMMANDS] == []
    sync = {field.name: field for field in dataclasses.fields(schema.SyncConf)}
    for group, _, key in (name.partition(".") for name in named(page, KEY)):
        kind = getattr(schema, f"{group.capitalize()}Conf")
        assert group in sync
        assert key in {field.name for field in dataclasses.fields(kind)}, f"weight_sync.{group}.{key}"


def test_the_page_of_all_keys_is_current() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, "run: make docs"


def test_the_page_of_all_keys_has_every_group() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    groups = [name for name in vars(schema) if name.endswith("Conf")]
    assert len(groups) > 10
    for name in groups:
        says = " ".join((getattr(schema, name).__doc__ or "").split())
        assert says in page, f"{name} is not in GROUPS of docs/generate.py"
