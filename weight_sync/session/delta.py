"""Deltas, the controller's part: is one allowed, what changed, in which rounds it travels, what it came to.

A delta session differs from a complete one in how bytes come into the live parameters, and in nothing else: it is begun,
verified (digests of all bytes of every transfer, on both sides), committed and resumed as ever. It is allowed only on top of a
version of which everybody still says that it is the last thing that happened to him:

    the controller   the version was committed over this very binding: nothing failed, joined, left or was bound anew since
    every engine     shows the receipt of that version (asked anew each time, before anything is paused)
    every rank       holds a snapshot of what it sent for that version, by session, version, digest and plan

Otherwise, or where it would not pay, the sync is complete, and says why (Reason).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.delta.spec import Base, DeltaSpec
from weight_sync.errors import SessionError
from weight_sync.plan.pieces import staged
from weight_sync.session.calls import on_each
from weight_sync.session.connect import Connection
from weight_sync.session.contracts import Receipt
from weight_sync.session.verify import Level

if TYPE_CHECKING:
    from weight_sync.session.attempt import Attempt

_log = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why a sync is complete although deltas are on; in metrics as delta/complete/<reason>."""

    FIRST = "first"
    BOUND = "bound"
    LEVEL = "level"
    RECEIPT = "receipt"
    SNAPSHOT = "snapshot"
    SHARE = "share"


@dataclass(slots=True)
class DeltaReport:
    """One sync where deltas are on. reason, text: why it was complete; None and "" for a delta session.

    changed, elements: of all that is sent, each once however many replicas it goes to; of a complete session, as far as was
    looked. encoded: bytes that changes take on the wire, complete: bytes that all takes. encode_seconds: from the first
    comparison to the last reply, engines serve meanwhile. apply_seconds: of the slowest worker, summed over rounds.
    keep_seconds: after the engines were resumed. snapshot: bytes of snapshots, by trainer rank.
    """

    reason: Reason | None = None
    text: str = ""
    changed: int = 0
    elements: int = 0
    encoded: int = 0
    complete: int = 0
    rounds: int = 0
    encode_seconds: float = 0.0
    apply_seconds: float = 0.0
    keep_seconds: float = 0.0
    snapshot: dict[int, int] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        return self.reason is None

    def figures(self) -> dict[str, float]:
        """For metrics and the report, under delta/."""
        values: dict[str, float] = {
            "delta/used": float(self.used),
            "delta/complete_bytes": self.complete,
            "delta/keep_seconds": self.keep_seconds,
            "delta/snapshot_bytes": max(self.snapshot.values(), default=0),
        }
        if self.reason is not None:
            values[f"delta/complete/{self.reason}"] = 1.0
        if self.elements:
            values |= {
                "delta/changed_share": self.changed / self.elements,
                "delta/encoded_bytes": self.encoded,
                "delta/encoded_share": self.encoded / max(1, self.complete),
                "delta/encode_seconds": self.encode_seconds,
            }
        if self.used:
            values |= {"delta/rounds": self.rounds, "delta/apply_seconds": self.apply_seconds}
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What trainer ranks have encoded for one session. messages: [rollout rank, bytes] of each trainer rank."""

    base: Base
    messages: dict[int, list[list[int]]]
    digests: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Committed:
    """The last version that was committed and kept: over which binding, with which receipts."""

    connection: Connection
    base: Base
    receipts: tuple[Receipt, ...]


class Deltas:
    """One for a session object. spec: None where deltas are off; then nothing here does anything."""

    def __init__(self, spec: DeltaSpec | None = None) -> None:
        self._spec = spec
        self._last: _Committed | None = None
        self._begun = False

    # -- before anything is paused -----------------------------------------------------------------------------------

    def encode(self, attempt: Attempt) -> None:
        """Decide, and where a delta is allowed have every rank encode what changed. Fills attempt.delta and attempt.offer."""
        if self._spec is None:
            return
        report = attempt.delta = DeltaReport(complete=int(attempt.connection.plan.nbytes.sum()))
        refused = self._refused(attempt)
        if refused is None:
            with attempt.watch.phase("encode"):
                attempt.quiesce()
                refused = self._offered(attempt, report)
        if refused is not None:
            report.reason, report.text = refused
            text = f"version {attempt.version}: complete session, no delta: {report.text}"
            _log.info(text)
            attempt.watch.say(text)

    def _refused(self, attempt: Attempt) -> tuple[Reason, str] | None:
        """Why this sync has to be complete, as far as controller and engines know."""
        last, level = self._last, attempt.level
        if level in (Level.OFF, Level.AGAINST_HELD):
            what = "compares nothing" if level is Level.OFF else "scrambles what engines hold before it writes"
            return Reason.LEVEL, f"verify.level={level} {what}"
        if last is None:
            if self._begun:
                return Reason.BOUND, "the last sync failed or was not verified"
            return Reason.FIRST, "nothing was committed by this controller yet"
        if last.connection is not attempt.connection:
            return Reason.BOUND, (
                f"{last.base.text()} was committed over another binding: engines joined or left, or everything was bound anew"
            )
        engines = [replica.engine for replica in attempt.members]
        for i, found in on_each(engines, lambda _, e: e.describe(attempt.deadline), attempt.deadline).items():
            state = found.state
            if state is None or state.receipt != last.receipts[i] or state.session:
                where = "does not say where it stands" if state is None else state.text()
                return Reason.RECEIPT, f"engine {engines[i].name} does not show the receipt of {last.base.text()}: {where}"
        return None

    def _offered(self, attempt: Attempt, report: DeltaReport) -> tuple[Reason, str] | None:
        assert self._last is not None
        begun, base, ranks = time.monotonic(), self._last.base, range(attempt.trainers.world)
        payload: dict[str, Any] = {"session": attempt.session, "base": base.to_json()}
        by_rank = dict.fromkeys(ranks, payload)
        if attempt.magnitudes is not None:
            by_rank = {rank: payload | {"magnitudes": attempt.magnitudes[rank]} for rank in ranks}
        replies = attempt.trainers.call("encode", by_rank, attempt.deadline)
        for rank, reply in replies.items():
            _same_session(rank, "encode", reply, attempt.session)
            attempt.watch.add_spans(f"trainer {rank}", reply["spans"])
        if missing := [str(reply["missing"]) for reply in replies.values() if reply["missing"] is not None]:
            return Reason.SNAPSHOT, missing[0] + (f" (and {len(missing) - 1} more ranks)" if len(missing) > 1 else "")
        report.encode_seconds = time.monotonic() - begun
        report.changed = sum(int(reply["changed"]) for reply in replies.values())
        report.elements = sum(int(reply["elements"]) for reply in replies.values())
        report.encoded = sum(int(reply["encoded"]) for reply in replies.values())
        report.snapshot = {rank: int(reply["snapshot"]) for rank, reply in replies.items()}
        if over := [rank for rank, reply in replies.items() if reply["over"]]:
            assert self._spec is not None
            rank, reply = over[0], replies[over[0]]
            return Reason.SHARE, (
                f"the changes of trainer rank {rank} take more than {self._spec.max_share:.0%} of its {reply['bytes']} bytes "
                f"({reply['encoded']} before it stopped; weight_sync.delta.max_share)"
            )
        report.encoded = sum(size for reply in replies.values() for _, size in reply["messages"])
        attempt.offer = Offer(
            base,
            {rank: list(reply["messages"]) for rank, reply in replies.items()},
            {rank: str(reply["digests"]) for rank, reply in replies.items()},
        )
        return None

    # -- in place of writing everything ------------------------------------------------------------------------------

    def send(self, attempt: Attempt) -> dict[int, str]:
        """Write what was encoded, round by round, and have workers apply it. Returns the ranks' digests of all they send."""
        offer, report = attempt.offer, attempt.delta
        assert offer is not None
        assert report is not None
        assert self._spec is not None
        width = attempt.connection.dims.engine_world
        rows = [(to, size, rank, n) for rank, sizes in offer.messages.items() for n, (to, size) in enumerate(sizes)]
        # By destination, its senders in turn: so that a round is not filled by one of them while the others wait.
        rows.sort(key=lambda row: (row[0], row[3], row[2]))
        to, size, source, number = np.asarray(rows, np.int64).reshape(-1, 4).T
        round_, offset = staged(to, size, self._spec.staging)
        report.rounds = int(round_.max(initial=-1)) + 1
        for r in range(report.rounds):
            out: dict[int, list[list[Any]]] = {}
            into: dict[int, dict[int, list[list[int]]]] = {}
            for i in np.flatnonzero(round_ == r).tolist():
                place, local = divmod(int(to[i]), width)
                message = [int(number[i]), int(offset[i]), attempt.connection.labels[place]]
                out.setdefault(int(source[i]), []).append(message)
                into.setdefault(place, {}).setdefault(local, []).append([int(source[i]), int(offset[i]), int(size[i])])
            self._round(attempt, offer, report, r, out, into)
        return offer.digests

    def _round(
        self,
        attempt: Attempt,
        offer: Offer,
        report: DeltaReport,
        round_: int,
        out: Mapping[int, list[list[Any]]],
        into: Mapping[int, Mapping[int, list[list[int]]]],
    ) -> None:
        common = {
            "session": attempt.session,
            "round": round_,
            "base": offer.base.to_json(),
            "seconds": attempt.deadline.check("write"),
        }
        payloads = {rank: common | {"messages": messages} for rank, messages in sorted(out.items())}
        for rank, reply in attempt.trainers.call("send", payloads, attempt.deadline).items():
            _same_session(rank, "send", reply, attempt.session)
            attempt.moved, attempt.writes = attempt.moved + reply["bytes"], attempt.writes + reply["writes"]
            attempt.watch.add_spans(f"trainer {rank}", reply["spans"])
        places = sorted(into)
        width = attempt.connection.dims.engine_world
        engines = [attempt.members[place].engine for place in places]
        replies = on_each(
            engines,
            lambda i, engine: engine.patch(
                attempt.session,
                offer.base.to_json(),
                {local: into[places[i]].get(local, []) for local in range(width)},
                attempt.deadline,
            ),
            attempt.deadline,
        )
        report.apply_seconds += max(float(r["seconds"]) for by_rank in replies.values() for r in by_rank.values())

    # -- after the engines were resumed ------------------------------------------------------------------------------

    def keep(self, attempt: Attempt) -> None:
        """The version is committed and served: ranks keep what they sent of it as the base of the next delta."""
        report, self._last, self._begun = attempt.delta, None, True
        if report is None:
            return
        try:
            self._keep(attempt, report)
        except BaseException as error:
            error.add_note(
                f"version {attempt.version} is committed and served by every engine; what the next delta would be compared "
                "with could not be kept"
            )
            raise
        attempt.watch.figures(report.figures())

    def _keep(self, attempt: Attempt, report: DeltaReport) -> None:
        if attempt.verified is not None and attempt.verified.verified:
            begun = time.monotonic()
            base = Base(attempt.session, attempt.version, attempt.verified.digest)
            payload = {"session": attempt.session, "base": base.to_json(), "encoded": attempt.offer is not None}
            with attempt.watch.phase("keep"):
                replies = attempt.trainers.call("keep", dict.fromkeys(range(attempt.trainers.world), payload), attempt.deadline)
            report.keep_seconds = time.monotonic() - begun
            report.snapshot = {rank: int(reply["snapshot"]) for rank, reply in replies.items()}
            self._last = _Committed(attempt.connection, base, attempt.receipts)

    def forget(self) -> None:
        """A sync failed: nothing is known to be a base any more."""
        self._last, self._begun = None, True


def _same_session(rank: int, method: str, reply: Mapping[str, Any], session: str) -> None:
    if reply["session"] != session:
        raise SessionError(f"trainer rank {rank} answered {method} of session {session} with that of {reply['session']}")
