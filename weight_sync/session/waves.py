"""A sync in waves: HF tensors beside the weights, verified, then handed to the engines' own loaders, wave after wave.

Write, verify and load take turns because the waves share their memory; which wave holds what is the plan's (plan/waves.py).
Nothing is handed over whose digest is not that of the source. The first wave begins a load in the engine, the last ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from weight_sync.errors import VerifyError
from weight_sync.session.calls import on_each
from weight_sync.session.contracts import CheckStep
from weight_sync.session.state import State
from weight_sync.session.verify import Level, Verified, verify

if TYPE_CHECKING:
    from weight_sync.session.attempt import Attempt


def load(attempt: Attempt) -> Verified:
    """Everything between begin and commit, for an attempt whose schedule has waves.

    by_rank of the result is empty: the bytes that were compared are gone, so no engine can read them from another.
    """
    level = attempt.level
    digest = _load(attempt, level)
    attempt.machine.to(State.WRITTEN)
    with attempt.watch.phase("verify"):
        if level is Level.CHECK_WEIGHT_EQUAL:
            _step(attempt, "snapshot")
            _step(attempt, "scramble")
    if level is Level.CHECK_WEIGHT_EQUAL:
        attempt.rescan()
        if _load(attempt, Level.DIGEST) != digest:
            raise VerifyError("the trainer's weights changed between two writes of one sync")
    with attempt.watch.phase("verify"):
        if level in (Level.CHECK_WEIGHT_EQUAL, Level.AGAINST_HELD):
            _step(attempt, "compare")
        verified = Verified(level, f"unverified-{digest}" if level is Level.OFF else digest, {})
        if verified.verified:
            attempt.watch.mark_verified()
    attempt.machine.to(State.VERIFIED)
    return verified


def _load(attempt: Attempt, level: Level) -> str:
    """All waves once. Returns a digest of all transfers."""
    schedule, watch, total = attempt.connection.schedule, attempt.watch, xxhash.xxh3_128()
    engines = [replica.engine for replica in attempt.members]
    each = level if level in (Level.OFF, Level.FULL) else Level.DIGEST
    for wave, part in enumerate(schedule.waves):
        with watch.phase("write"):
            sent = attempt.write(wave)
        with watch.phase("verify"):
            found = verify(
                each, part.plan, attempt.trainers, engines, attempt.session, sent, attempt.deadline, wave=wave, again=dict
            )
        total.update(found.digest.encode())
        with watch.phase("post"):
            on_each(engines, lambda _, e, w=wave: e.feed(attempt.session, w, attempt.deadline), attempt.deadline)
    with watch.phase("write"):
        attempt.count_written()
    beside = schedule.beside
    assert beside is not None
    watch.figures(
        {
            "loader/waves": float(beside.count),
            "loader/tensors": float(len(beside.wave)),
            "loader/staged_bytes": float(beside.nbytes.max(initial=0)),
        }
    )
    return total.hexdigest()


def _step(attempt: Attempt, step: CheckStep) -> None:
    engines = [replica.engine for replica in attempt.members]
    on_each(engines, lambda _, e: e.check(attempt.session, step, attempt.deadline), attempt.deadline)
