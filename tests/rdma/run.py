"""make test-rdma: the tests in tests/rdma/inside, run in the guest. Exit code: pytest's; 1, with the console, if it has none.

    .venv/bin/python tests/rdma/run.py [pytest words]      tests/rdma/inside when no path is among them
    .venv/bin/python tests/rdma/run.py --command 'rdma link'

Environment: RDMA_GUEST_SECONDS, for the whole run; RDMA_GUEST_SHARE, a folder for what the tests leave behind
(outputs/rdma-guest).
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rdma_guest import REPOSITORY, RdmaGuest, Unavailable, prepare

SECONDS = 3600.0


def main(words: list[str]) -> int:
    try:
        guest = RdmaGuest(
            prepare(),
            share=Path(os.environ.get("RDMA_GUEST_SHARE", REPOSITORY / "outputs" / "rdma-guest")).absolute(),
            listen=lambda text: print(text, end="", flush=True),
        )
    except Unavailable as reason:
        print(f"rdma: skipped, {reason}")
        return 0
    if words[:1] == ["--command"]:
        command = " ".join(words[1:])
    else:
        named = any((REPOSITORY / word.partition("::")[0]).exists() for word in words)  # "killed" of "-k killed" is no path
        chosen = words if named else [*words, "tests/rdma/inside"]
        command = shlex.join(
            [".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "600", "--durations", "10", *chosen]
        )
    result = guest.run(command, seconds=float(os.environ.get("RDMA_GUEST_SECONDS", SECONDS)))
    print(
        f"rdma: guest up after {result.booted_after or 0:.0f} s, gone after {result.seconds:.0f} s; its files: {result.share}"
    )
    if result.code is None:
        print(f"rdma: {result.explain()}")
        return 1
    return result.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
