"""House rules that hold for every file of the repository."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 500


def _any(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(words))


# Spelled in pieces, or this file would be the first to break its own rule.
PLACES = {
    "a path of the machine it was written on": _any("/wor" + r"k\b", "/tmp/" + r"w\b", "/roo" + r"t\b", "/opt/" + "wheels"),
    "a package registry": _any(
        "pypi" + r"\.org",
        "python" + "hosted",
        "registry" + r"\.npmjs",
        "anaconda" + r"\.org",
        "download" + r"\.pytorch\.org",
        "huggingface" + r"\.co",
        "index" + r"-url\s*[= ]\s*http",
        "arti" + "factory",
        "nexus" + r"\.",
    ),
    "the workshop it was written in": _any(r"(^|[\s/'\"`(])\." + r"library\b", r"\bshared" + "/", "BRIEF" + r"\.md"),
}


@cache
def tracked() -> tuple[Path, ...]:
    """Files that git knows or would add; without git, all but the ignored folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        names = [name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        skip = {".git", ".venv", ".venvs", "outputs", "__pycache__", "build", "dist", "wandb"}
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if not skip & set(p.relative_to(ROOT).parts)]
    return tuple(path for name in sorted(names) if (path := ROOT / name).is_file() and not path.is_symlink())


def texts() -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            found.append((str(path.relative_to(ROOT)), data.decode("utf-8")))
    return found


def test_the_repository_has_files_to_look_at():
    names = {str(p.relative_to(ROOT)) for p in tracked()}
    assert {
        "pyproject.toml",
        "weight_sync/errors.py",
        "conf/weight_sync/family/qwen3.yaml",
        "tests/repo/test_files.py",
    } <= names


def test_no_python_file_is_longer_than_five_hundred_lines():
    long = {name: text.count("\n") for name, text in texts() if name.endswith(".py") and text.count("\n") > LONGEST}
    assert not long


@pytest.mark.parametrize("what", PLACES)
def test_no_file_names(what):
    hits = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if PLACES[what].search(line)
    ]
    assert not hits, f"these name {what}:\n" + "\n".join(hits)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of the machine it was written on", "cd /wor" + "k/main"),
        ("a path of the machine it was written on", "see /tmp/" + "w/notes"),
        ("a package registry", "pip install --index" + "-url https://example.com/simple x"),
        ("the workshop it was written in", "ls ." + "library"),
    ],
)
def test_the_rule_finds_what_it_is_there_to_find(what, line):
    assert PLACES[what].search(line)


@pytest.mark.parametrize(
    "line", ["/workers/3", "/tmp/wandb", "/rooted", "a_workspace/x", "torch.library.Library", "shared, not copied"]
)
def test_the_rule_leaves_other_words_alone(line):
    assert not any(pattern.search(line) for pattern in PLACES.values())


def test_every_module_that_is_not_empty_says_what_it_is_for():
    first = re.compile(r'(#[^\n]*\n|\s)*r?"""')
    assert not [name for name, text in texts() if name.endswith(".py") and text.strip() and not first.match(text)]


def test_every_package_folder_is_installed():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"weight_sync": "weight_sync", "weight_sync_integrations": "integrations", "weight_sync_conf": "conf"}
    want = set()
    for package, folder in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            want.add(".".join((package, *inside)))
    assert want <= set(config["packages"])
