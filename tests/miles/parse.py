"""miles's own parser, in a process of its own with everything that miles-rl brings (its fork of Megatron too) on the path.

parse.py args OUT WORD...      parse and check as its train script does; the Namespace is pickled to OUT
parse.py ask OUT < JSON        {"compare": {case: [words, words]}, "problems": {case: words}}
                               -> {"compare": {case: {argument: [first, second]} where the two differ},
                                   "problems": {case: what our parser.problems() says}}
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import torch

# Its Megatron asks what GPU this is while it checks arguments.
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, name="H100")
torch.cuda.get_device_capability = lambda *_: (9, 0)


def main() -> None:
    mode, out = sys.argv[1], Path(sys.argv[2])
    if mode == "args":
        from miles.utils.arguments import parse_args

        sys.argv = ["train.py", *sys.argv[3:]]
        out.write_bytes(pickle.dumps(parse_args()))
        return
    from weight_sync_integrations.miles import parser

    asked = json.load(sys.stdin)
    answer = {
        "compare": {case: _differences(*map(_parsed, words)) for case, words in asked["compare"].items()},
        "problems": {case: parser.problems(words) for case, words in asked["problems"].items()},
    }
    out.write_text(json.dumps(answer, default=repr))


def _parsed(words: list[str]) -> dict[str, Any]:
    from weight_sync_integrations.miles.parser import parse

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return vars(parse(words))
    except SystemExit:
        return {"error": said.getvalue()[-600:]}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    missing = "(absent)"
    pairs = {key: [first.get(key, missing), second.get(key, missing)] for key in first.keys() | second.keys()}
    found = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    return found | ({"error": [first["error"], second.get("error")]} if "error" in first else {})


if __name__ == "__main__":
    main()
