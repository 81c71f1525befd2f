"""python -m weight_sync doctor: what this machine offers, and which strategies would work on it."""

from __future__ import annotations

from weight_sync.errors import ConfigError
from weight_sync.transport import preflight


def run(words: list[str]) -> int:
    if words:
        raise ConfigError(f"doctor takes no words, got {' '.join(words)}")
    print(preflight.report(preflight.facts()))
    return 0
