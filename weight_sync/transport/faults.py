"""Faults to inject into the in-process transport: what networks, NICs and Mooncake were seen to do, made repeatable."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class FaultKind(StrEnum):
    """How one write (or read) goes wrong.

    DROP, CORRUPT, TRUNCATE: success is reported although no byte arrives, one byte is flipped, the second half is missing.
    DUPLICATE: moved, and moved again later from whatever its source holds by then.
    DELAY: completes `seconds` after wait() was called; past the deadline wait() raises and the bytes land afterwards.
    ERROR: fails with `code`, nothing of it arrives; the rest of its batch lands.
    GHOST: fails with `code`, and lands afterwards from whatever the source holds by then, unless either end was closed.
    EARLY: reported done when the bytes have only left (a kernel buffer has them): they arrive later, unless the peer closed.
    """

    DROP = "drop"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    DELAY = "delay"
    ERROR = "error"
    GHOST = "ghost"
    EARLY = "early"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    seconds: float = 0.0
    code: int | str = "injected"


class FaultPlan(Protocol):
    def fault(self, index: int) -> Fault | None:
        """The fault of range number `index`, counted from 0 over all batches of one transport, reads too; or None."""
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
