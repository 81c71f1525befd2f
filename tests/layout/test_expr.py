"""The arithmetic of family files: what it computes, and that nothing else runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import FamilyError
from weight_sync.layout.expr import ceil_to, evaluate

NAMES = {"heads": 8, "kv": 2, "dim": 4, "tied": 0, "pp": 2, "none": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (7, 7),
        ("heads * dim", 32),
        ("heads + 2 * kv - 1", 11),
        ("heads // kv", 4),
        ("(heads + 2 * kv) * dim", 48),
        ("ceil(heads + 1, kv * 4)", 16),
        ("10 % dim", 2),
        ("1 + (dim - 1) * (10 % dim > 0)", 4),
        ("not tied", 1),
        ("tied and pp > 1", 0),
        ("tied or pp == 2", 1),
        ("not tied and pp != 1 and pp >= 2 and pp <= 2 and kv < 3", 1),
        ("  heads", 8),
        ("none and heads // none", 0),
    ],
)
def test_expressions_have_the_value_they_read_as(text, value):
    result = evaluate(text, NAMES, "here")
    assert result == value
    assert type(result) is int


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_ceil_is_the_smallest_multiple_not_below(value, multiple):
    result = ceil_to(value, multiple)
    assert result % multiple == 0
    assert value <= result < value + multiple


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("heads * depth", ["unknown name 'depth'", "dim, heads, kv"]),
        ("heads // 3", ["8 // 3 is not a whole number"]),
        ("heads // none", ["8 // 0 is not a whole number"]),
        ("heads % none", ["8 % 0", "at least 1"]),
        ("ceil(heads, none)", ["multiple of 0", "at least 1"]),
        ("heads *", ["cannot parse", "'heads *'"]),
        ("", ["cannot parse"]),
        ("\0", ["cannot parse"]),
        ("(" * 400, ["cannot parse"]),
        ("1 + " * 400 + "1", ["cannot parse", "longer than"]),
        ("9" * 5000, ["cannot parse"]),
        ("heads ** 2", ["only integers"]),
        ("heads / 2", ["only integers"]),
        ("1.5", ["only integers"]),
        ("-heads", ["only integers"]),
        ("'a'", ["only integers"]),
        ("1 < heads < 9", ["only integers"]),
        ("heads if tied else kv", ["only integers"]),
        ("__import__('os').system('true')", ["only integers"]),
        ("heads.real", ["only integers"]),
        ("[n for n in (1,)]", ["only integers"]),
        ("ceil(heads)", ["only integers"]),
        ("ceil(value=heads, multiple=2)", ["only integers"]),
        ("lambda: 1", ["only integers"]),
        ("heads; kv", ["cannot parse"]),
    ],
)
def test_anything_else_is_one_error_that_says_where(text, words):
    with pytest.raises(FamilyError) as caught:
        evaluate(text, NAMES, "family x, tensors.y")
    for word in ["family x, tensors.y", *words]:
        assert word in str(caught.value)
