"""Faults to inject into the in-process transport: what networks, NICs and Mooncake were seen to do, made repeatable."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class FaultKind(StrEnum):
    """How one write goes wrong.

    DROP, CORRUPT, TRUNCATE: success is reported although no byte arrives, one byte is flipped, the second half is missing.
    DUPLICATE: written, and written again later from whatever the source holds by then.
    DELAY: completes `seconds` after wait() was called; past the deadline wait() raises and the bytes land afterwards.
    ERROR: fails with `code`, nothing of it written; the rest of its batch lands.
    """

    DROP = "drop"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    DELAY = "delay"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    seconds: float = 0.0
    code: int | str = "injected"


class FaultPlan(Protocol):
    def fault(self, index: int) -> Fault | None:
        """The fault of write number `index`, counted from 0 over all batches of one transport, or None."""
        ...


@dataclass(frozen=True, slots=True)
class ScriptedFaults:
    """Exactly these faults, by write number."""

    script: Mapping[int, Fault]

    def fault(self, index: int) -> Fault | None:
        return self.script.get(index)


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """Each write fails with probability `rate`, in one of `kinds`; a function of the seed and the write number only."""

    seed: int
    rate: float
    kinds: Sequence[FaultKind] = tuple(FaultKind)
    seconds: float = 0.0

    def fault(self, index: int) -> Fault | None:
        draw = random.Random(f"{self.seed}/{index}")
        if draw.random() >= self.rate:
            return None
        return Fault(draw.choice(list(self.kinds)), seconds=self.seconds)
