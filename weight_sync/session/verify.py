"""How much of a sync is checked before it may be committed. The session calls before_write() and verify().

    off                 nothing is compared. The plan is still proven to write every byte once, and memory that moved is still
                        refused. Said aloud on every sync, and reported as not verified.
    digest              a 64-bit digest of every transfer, of the source bytes (of what is packed or cast on the way: as it is
                        sent) and again of the live destination bytes.
    full                digest, and then every destination byte is read back by the source and compared with what it sent.
    check_weight_equal  digest, and then every byte that the plan covers is scrambled, written again and compared with a
                        snapshot taken before, as are all bytes that the plan does not cover.
    against_held        not a config level, but WeightSync.check_weight_equal(): the snapshot is taken before anything is
                        written, so the sync must bring back exactly what the engine held (loaded, or last committed).

docs/verification.md says what each finds and costs.

A check that fails raises: the sync has failed, engines stay paused, the version stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import VerifyError, listed
from weight_sync.ids import Deadline, Side
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.session.calls import on_each
from weight_sync.session.contracts import CheckStep, RolloutEngine, TrainerGroup
from weight_sync.session.digests import split_digests
from weight_sync.session.tables import merge_digests

_log = logging.getLogger(__name__)

Digests = Mapping[int, str]
"""By rank: the digests of its transfers in order, 16 hex digits each."""


class Level(StrEnum):
    """See the module docstring. weight_sync.schema.VerifyLevel has the same names, but for against_held."""

    OFF = "off"
    DIGEST = "digest"
    FULL = "full"
    CHECK_WEIGHT_EQUAL = "check_weight_equal"
    AGAINST_HELD = "against_held"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found equal. digest: of all transfers' digests, for receipts; a joiner's are compared with `by_rank`.

    by_rank: digests of the live bytes of each rollout rank; empty when nothing was compared.
    """

    level: Level
    digest: str
    by_rank: dict[int, str]

    @property
    def verified(self) -> bool:
        return self.level is not Level.OFF


def warn_if_off(level: Level, version: int) -> None:
    """Say on every sync that nothing will be compared."""
    if level is Level.OFF:
        _log.warning(
            "version %d is written and served without comparing a single byte (verify.level=off): a transfer that failed "
            "silently will not be noticed",
            version,
        )


def before_write(level: Level, engines: Sequence[RolloutEngine], session: str, deadline: Deadline) -> None:
    """After begin(), before bytes are written: what against_held has to do there, nothing at the other levels."""
    if level is Level.AGAINST_HELD:
        _scramble(engines, session, deadline)


def verify(
    level: Level,
    plan: Plan,
    trainers: TrainerGroup,
    engines: Sequence[RolloutEngine],
    session: str,
    sent: Digests,
    deadline: Deadline,
    *,
    wave: int = 0,
    again: Callable[[], Digests],
) -> Verified:
    """Check what was written, at `level`. Raises VerifyError for the first thing that is not as it must be.

    sent: the trainer ranks' digests of what they wrote (empty with off). again: write everything a second time and return the
    same; used by check_weight_equal. wave: which part of a plan in waves `plan` is (session/waves.py).
    """
    which: dict[str, Any] = {"wave": wave} if wave else {}
    if level is Level.OFF:
        on_each(engines, lambda _, e: e.verify(session, deadline, digests=False, **which), deadline)
        return Verified(level, f"unverified-{plan.digest}", {})
    verified = _digests(level, plan, engines, session, sent, deadline, which)
    if level is Level.FULL:
        payload = {"session": session, "seconds": deadline.check("verify")} | which
        trainers.call("compare", dict.fromkeys(range(trainers.world), payload), deadline)
    if level is Level.CHECK_WEIGHT_EQUAL:
        _scramble(engines, session, deadline)
        sent = again()
        second = _digests(level, plan, engines, session, sent, deadline, which)
        if second.digest != verified.digest:
            raise VerifyError("the trainer's weights changed between two writes of one sync")
    if level in (Level.CHECK_WEIGHT_EQUAL, Level.AGAINST_HELD):
        _step(engines, session, "compare", deadline)
    return verified


def check_joiner(engine: str, table: Mapping[str, Sequence[object]], committed: Sequence[str], reported: str) -> None:
    """Compare a joining worker's digests with those that were committed for the worker it read from.

    table: the target_table() that both were bound with. Raises VerifyError naming what differs.
    """
    where = f"engine {engine}, worker {table['rank']}"
    found = split_digests(reported)
    if not len(committed) == len(found) == len(table["tensors"]):
        raise VerifyError(
            f"{where}: {len(found)} digests for {len(table['tensors'])} transfers, {len(committed)} were committed"
        )
    wrong = [i for i, (a, b) in enumerate(zip(committed, found, strict=True)) if a != b]
    if wrong:
        text = (f"{table['tensors'][i]} ({table['params'][i]}): committed {committed[i]}, read {found[i]}" for i in wrong)
        raise VerifyError(f"{where}: {len(wrong)} of {len(found)} transfers are not the committed bytes: {listed(text)}")


def _scramble(engines: Sequence[RolloutEngine], session: str, deadline: Deadline) -> None:
    _step(engines, session, "snapshot", deadline)
    _step(engines, session, "scramble", deadline)


def _step(engines: Sequence[RolloutEngine], session: str, step: CheckStep, deadline: Deadline) -> None:
    on_each(engines, lambda _, e: e.check(session, step, deadline), deadline)


def _digests(
    level: Level,
    plan: Plan,
    engines: Sequence[RolloutEngine],
    session: str,
    sent: Digests,
    deadline: Deadline,
    which: Mapping[str, Any],
) -> Verified:
    """Compare every transfer's digest, source against live destination."""
    replies = on_each(engines, lambda _, e: e.verify(session, deadline, **which), deadline)
    width = plan.target_world // len(engines)
    for i, by_rank in replies.items():
        if sorted(by_rank) != list(range(width)):
            raise VerifyError(f"engine {engines[i].name}: workers {sorted(by_rank)} of {width} sent digests")
    target = {i * width + local: digests for i, by_rank in replies.items() for local, digests in by_rank.items()}
    ours = merge_digests(plan, Side.TRAINER, sent, plan.rows_from)
    theirs = merge_digests(plan, Side.ROLLOUT, target, plan.rows_to)
    wrong = np.flatnonzero(ours != theirs)
    if len(wrong):
        raise VerifyError(
            f"{len(wrong)} of {len(plan)} transfers arrived with other bytes than were sent: "
            + listed(_transfer_text(plan, row, ours, theirs) for row in wrong.tolist()),
            sorted(set(plan.target_rank[wrong].tolist())),
        )
    return Verified(level, xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ours).data), target)


def _transfer_text(plan: Plan, row: int, ours: Ints, theirs: Ints) -> str:
    s, t = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    sent, found = (int(np.uint64(d[row : row + 1].view(np.uint64)[0])) for d in (ours, theirs))
    return (
        f"{plan.catalog.name(int(plan.tensor[row]))} from trainer rank {s.rank} ({s.name}) to rollout rank {t.rank} "
        f"({t.name}): sent {sent:016x}, found {found:016x}"
    )
