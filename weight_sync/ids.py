"""Small value types that several packages share."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from weight_sync.errors import DeadlineExceeded

HfName = NewType("HfName", str)
"""A tensor's Hugging Face name: its identity everywhere in this library."""

TrainerRank = NewType("TrainerRank", int)
RolloutRank = NewType("RolloutRank", int)


class Side(StrEnum):
    """The two sides of a sync."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by the torch name of the dtype without its "torch." prefix."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time. Every blocking call of this library takes one; there are no hidden defaults."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(at=time.monotonic() + seconds, seconds=seconds)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def check(self, what: str) -> float:
        """Seconds left; raise DeadlineExceeded naming `what` when none are."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{what}: not done within its {self.seconds:g} s deadline")
        return left
