"""python -m weight_sync_integrations.miles TRAIN.PY ARGUMENTS: a train script of miles whose FSDP actors have our updater.

With the Megatron backend this is not needed: --custom-megatron-init-path is enough.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(words: list[str]) -> int:
    if not words:
        print(f"usage: {__doc__}", file=sys.stderr)
        return 2
    from weight_sync_integrations.miles.fsdp import substitute

    substitute()
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
