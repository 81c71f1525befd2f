"""Does miles's parser take a command line? Run in the interpreter that has miles:

    python -m weight_sync_integrations.miles.parser < words.json

words.json: a list of words. Standard output: {"miles": its version, "problems": [...]}. Exit code 3 when miles cannot be
imported (its SGLang and Megatron are needed to know its flags), with the reason.

Names (Megatron's parser takes no abbreviations), types and choices are argparse's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def problems(words: Sequence[str]) -> list[str]:
    """What miles's parser, without the checks that need the checkpoint, says to these words; empty if it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(words)
    except SystemExit:
        last = said.getvalue().strip().splitlines()
        return [last[-1] if last else "miles's parser gave up without a word"]
    return []


def parse(words: Sequence[str]) -> Any:
    """The Namespace of Megatron's parser with miles's flags added."""
    from miles.backends.megatron_utils.arguments import parse_args
    from miles.utils.arguments import get_miles_extra_args_provider

    before = sys.argv
    sys.argv = ["train.py", *words]
    try:
        return parse_args(extra_args_provider=get_miles_extra_args_provider(None))
    finally:
        sys.argv = before


def main() -> int:
    words = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print while they are imported is no answer
    try:
        import miles.utils.arguments  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being imported is the answer
        print(json.dumps({"absent": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return 3
    print(json.dumps({"miles": _version(), "problems": problems(words)}), file=out, flush=True)
    return 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("miles-rl")
    except PackageNotFoundError:
        return "from a checkout"


if __name__ == "__main__":
    sys.exit(main())
