"""What a job says about deltas (weight_sync.delta), and what a delta applies to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weight_sync.errors import ConfigError

LEAST_STAGING = 1024
"""Bytes: two messages of one record each must fit."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """snapshot: where each trainer rank keeps the bytes it last sent: host memory, or the device that its parameters are on.

    max_share: a rank whose encoded changes take more than this share of its bytes makes the sync a complete one. staging:
    bytes of registered memory for encoded changes on each trainer rank and each engine worker (there, the larger of this and
    what the plan needs for unpacking).
    """

    snapshot: Literal["host", "device"] = "host"
    max_share: float = 0.5
    staging: int = 64 << 20

    def __post_init__(self) -> None:
        if self.snapshot not in ("host", "device"):
            raise ConfigError(f"delta.snapshot={self.snapshot!r}: must be host or device")
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"delta.max_share={self.max_share}: must be above 0 and at most 1")
        if self.staging < LEAST_STAGING:
            raise ConfigError(f"delta.staging={self.staging}: must be at least {LEAST_STAGING} bytes")

    @property
    def message(self) -> int:
        """Most bytes of one message: two fit the staging buffers, one is filled while the other is on the wire."""
        return self.staging // 2 // 64 * 64

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Base:
    """The committed version that a delta applies to: which, by which session, and the digest of all its transfers."""

    session: str
    version: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Base:
        return cls(str(data["session"]), int(data["version"]), str(data["digest"]))

    def text(self) -> str:
        return f"version {self.version} of session {self.session}"
