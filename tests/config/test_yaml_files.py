"""A key that a file gives twice: plain YAML keeps the last and says nothing, so a file may say other than it seems to."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from weight_sync.config import engine_yaml, family_yaml, quant_yaml
from weight_sync.errors import ConfigError, FamilyError
from weight_sync.simulate import load_cluster
from weight_sync.yamls import read_yaml

SHIPPED = sorted(
    item
    for folder in ("cluster", "family", "engine", "quant")
    for item in Path(str(resources.files("weight_sync_conf").joinpath("weight_sync", folder))).glob("*.yaml")
)


def read(text: str) -> Any:
    return read_yaml(text, "mine.yaml", ConfigError)


@pytest.mark.parametrize(
    ("kind", "load", "kept"),
    [
        ("cluster", load_cluster, "h200"), ("family", family_yaml, "qwen3"), ("engine", engine_yaml, "sglang"),
        ("quant", quant_yaml, "fp8_block"),
    ],
)  # fmt: skip
def test_a_key_given_twice_is_an_error_that_names_file_key_and_both_lines(
    kind: str, load: Callable[[str], Any], kept: str, tmp_path: Path
) -> None:
    text = resources.files("weight_sync_conf").joinpath("weight_sync", kind, f"{kept}.yaml").read_text()
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line[:1].isalpha())
    key = lines[first].partition(":")[0]
    file = tmp_path / f"{kind}.yaml"
    file.write_text(f"{text.rstrip()}\n{key}: other\n")
    with pytest.raises((ConfigError, FamilyError)) as raised:
        load(str(file))
    assert str(raised.value) == (
        f"{file}, line {len(text.rstrip().splitlines()) + 1}: {key} is given a second time, first in line {first + 1}; "
        "keep one of them"
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a:\n  b: 1\n  c: 2\n  b: 1\n", "line 4: a.b is given a second time, first in line 2"),
        ("a:\n- x: 1\n- y: 1\n  y: 2\n", r"line 4: a\[1\].y is given a second time, first in line 3"),
        ("a: {b: 1, b: 2}\n", "line 1: a.b is given a second time, first in line 1"),
        ("base: &b {x: 1, x: 1}\nmore: *b\n", "line 1: base.x is given a second time"),
        ("a: 1\n'a': 2\n", "line 2: a is given a second time"),
    ],
)
def test_blocks_at_any_depth_are_looked_at_even_where_both_values_are_equal(text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=rf"mine.yaml, {where}"):
        read(text)


def test_what_a_merge_key_brings_in_may_be_given_again_and_the_rest_is_read_as_before() -> None:
    assert read("base: &b {x: 1, y: 2}\nmine:\n  <<: *b\n  x: 3\n") == {"base": {"x": 1, "y": 2}, "mine": {"x": 3, "y": 2}}
    assert read("a: {b: 1}\nc: {b: 2}\n'1': x\n1: y\n") == {"a": {"b": 1}, "c": {"b": 2}, "1": "x", 1: "y"}
    assert read("# nothing\n") is None
    with pytest.raises(ConfigError, match=r"mine\.yaml: not readable as YAML"):
        read("{broken")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_shipped_file_gives_a_key_twice(file: Path) -> None:
    assert read(file.read_text())
