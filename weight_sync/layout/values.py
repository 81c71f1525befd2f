"""Value functions: how a parameter's values follow from an HF tensor's where its bytes are not simply placed.

The set is closed. A rule names one with `value: NAME`; what is not in FUNCTIONS is refused by name when a file is read, and
casts between dtypes that CASTS does not list are refused when a layout is resolved and again when a plan is made and proven.
Padding is no value function: filling is never written.
"""

from __future__ import annotations

FUNCTIONS: dict[str, str] = {
    "cast": "the HF tensor's dtype is converted to the rule's dtype; carried out while the source packs",
}
"""Name -> what it does. Implemented: a plan carries it out."""

REFUSED: dict[str, str] = {
    "minus_one": "a norm that one side holds as weight - 1 (Qwen3-Next's output norm of linear attention in Megatron-Core)",
    "gated_qkv": "query heads that each bring a gate along in one projection (Qwen3-Next, Qwen3.5)",
    "dequantise": "values times scales (FP8 and MXFP4 checkpoints)",
}
"""Value functions that models outside the supported families need. Known by name, and not carried out."""

CASTS: frozenset[tuple[str, str]] = frozenset({("bfloat16", "float32"), ("float32", "bfloat16")})
"""(from, to). To float32 is exact; to bfloat16 rounds to nearest, ties to even, as torch's Tensor.to() does."""

QUANTISED_FROM: tuple[str, ...] = ("bfloat16", "float32")
"""Dtypes of a trainer's weights that quantisation schemes take (weight_sync.quant)."""


def cast_text(source: str, target: str) -> str:
    """The words for a cast. The recorder says the same of what it sees an engine's loader do."""
    return f"cast from {source} to {target}"


def is_cast(text: str) -> bool:
    """Whether a recorder's words are those of a cast."""
    return text.startswith("cast from ")


def legal_casts() -> str:
    return ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))


def problem(name: str) -> str | None:
    """Why a rule's `value` is refused, or None when it is in the closed set."""
    if name in FUNCTIONS:
        return None
    if name in REFUSED:
        return f"value: {name} is not carried out by any plan: {REFUSED[name]}; legal: {', '.join(FUNCTIONS)}"
    return f"unknown value function {name!r}; legal: {', '.join(FUNCTIONS)}"
