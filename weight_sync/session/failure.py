"""What happens after a failure: how often a sync is tried again, and with whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weight_sync.errors import ConfigError, PlanError, TransportError, VerifyError, WeightsError, WitnessError
from weight_sync.session.calls import blamed
from weight_sync.session.connect import Connection
from weight_sync.session.fence import Fence

OnSuspect = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """attempts: sessions that one sync() may take. seconds: no new one begins later than this after the first began.

    on_suspect: keep: a replica that fails, fails the attempt for all. drop: the next attempt goes on without the replicas that
    failed; it is unanimous among the others, and those left out stay suspect and are not resumed. other_source: the next
    attempt takes bytes from another trainer rank than one whose write failed, where another holds them.

    Before every attempt but the first: transports of both ends closed and replaced, everything planned and bound anew.
    """

    attempts: int = 1
    seconds: float = 600.0
    on_suspect: OnSuspect = "keep"
    other_source: bool = False

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ConfigError(f"failure.attempts={self.attempts!r}: must be an integer of at least 1")
        if not self.seconds > 0:
            raise ConfigError(f"failure.seconds={self.seconds!r}: must be above 0")
        if self.on_suspect not in ("keep", "drop"):
            raise ConfigError(f"failure.on_suspect={self.on_suspect!r}: must be keep or drop")
        if self.attempts == 1 and (self.on_suspect == "drop" or self.other_source):
            raise ConfigError(
                f"failure.on_suspect={self.on_suspect}, failure.other_source={self.other_source} with failure.attempts=1: both "
                "say what the next attempt does differently; give attempts of at least 2"
            )


class Lessons:
    """What the attempts of one sync have taught. avoid: trainer ranks to take no bytes from that another one holds."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._hit: set[str] = set()
        self.avoid: set[int] = set()

    def learn(
        self, error: BaseException, connection: Connection | None, names: list[str], fence: Fence
    ) -> tuple[set[str], str]:
        """(engines to leave out of the next attempt, what it does differently in words). names: the engines of this one.

        A write that failed tells against its source first, if sources may be changed, and against the engine when it happens
        again. At least one engine always stays.
        """
        struck = hit_engines(error, connection, names)
        if self._policy.other_source and fence.hurt - self.avoid and not struck & self._hit:
            self.avoid |= fence.hurt
            self._hit |= struck
            return set(), f", without trainer ranks {sorted(fence.hurt)} where another holds the same bytes"
        blamed = blamed_engines(error, connection, names) | struck | (fence.unreached & set(names))
        if self._policy.on_suspect == "keep" or not blamed or blamed >= set(names):
            return set(), ""
        return blamed, f", without {', '.join(sorted(blamed))}, which stay out until they join again"


def worth_retrying(error: BaseException) -> bool:
    """Whether another attempt could end otherwise: not for what was declared wrongly, for NaN in weights, for an interrupt."""
    return isinstance(error, Exception) and not isinstance(error, ConfigError | PlanError | WeightsError | WitnessError)


def blamed_engines(error: BaseException, connection: Connection | None, names: list[str]) -> set[str]:
    """The engines that an attempt's error points to: whose own call failed, or whose bytes were not what was sent."""
    found = set(blamed(error))
    if isinstance(error, VerifyError) and connection is not None:
        found |= {names[rank // connection.dims.engine_world] for rank in error.rollout_ranks}
    return found & set(names)


def hit_engines(error: BaseException, connection: Connection | None, names: list[str]) -> set[str]:
    """The engines to which a write failed, by the endpoint that the transport's error names."""
    if not isinstance(error, TransportError) or connection is None:
        return set()
    words = set(re.split(r"[\s,]+", error.endpoint))
    return {
        name
        for name, by_rank in zip(names, connection.bindings, strict=True)
        if any(binding["endpoint"]["address"] in words for binding in by_rank.values())
    }
