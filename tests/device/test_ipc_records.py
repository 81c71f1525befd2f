"""The fence of queued copies: whoever closes its memory waits for what was queued for it, and nothing is queued afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from ipc_sides import open_files

from weight_sync.transport import ipc_records
from weight_sync.transport.ipc_records import ROUND, SENDERS, Gate, Sender


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    path = tmp_path / "weight_sync-ipc-peer"
    path.touch()
    return path


@pytest.fixture
def gate(peer: Path) -> Gate:
    return Gate(peer)


def sender_at(peer: Path) -> Sender:
    sender = Sender.claim(peer)
    assert sender is not None
    return sender


def done(*numbers: int) -> Callable[[], list[int]]:
    return lambda: [*numbers, *[0] * (SENDERS - len(numbers))]


def stepping(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], None]) -> Callable[[], None]:
    """look() is given the number of each step of a sender: before each call of the system that it makes, and where what is
    returned is called. What look() itself calls is no step."""
    numbers, looking = count(), [False]

    def step() -> None:
        if not looking[0]:
            looking[0] = True
            look(next(numbers))
            looking[0] = False

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            step()
            return call(*arguments)

        return made

    for module, name in ((ipc_records.fcntl, "flock"), (ipc_records.os, "pread"), (ipc_records.os, "pwrite")):
        monkeypatch.setattr(module, name, before(getattr(module, name)))
    return step


QUEUED = ["lock", "issued", "closed", "queue", "queued", "unlock", "after"]
REFUSED = ["lock", "issued", "closed", "issued as before", "unlock", "after"]
"""Steps of a sender; REFUSED: where the peer closed before the third."""


@pytest.mark.parametrize("common", [True, False], ids=["one lock", "a lock each"])
@pytest.mark.parametrize(
    ("first", "again"), [(a, b) for a in range(len(QUEUED)) for b in range(a, len(REFUSED if a < 3 else QUEUED))]
)
def test_whenever_the_peer_closes_it_either_waits_for_the_copies_or_they_are_never_queued(
    peer: Path, gate: Gate, first: int, again: int, common: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, at, queued, drained = sender_at(peer), [0], list[int](), list[bool]()

    def look(number: int) -> None:
        """The peer closes, or looks again."""
        if number in (first, again):
            drained.append(gate.drain(done(at[0]), 0.0) is None)
            assert not (drained[-1] and queued)

    def queue(number: int) -> None:
        step()
        assert not any(drained), "queued after the peer had closed"
        queued.append(number)
        step()

    with monkeypatch.context() as patch:
        if not common:  # each has it when it asks
            patch.setattr(ipc_records.fcntl, "flock", lambda descriptor, how: None)
        step = stepping(patch, look)
        was_queued = sender.issue(queue)
        step()
    assert len(drained) == len({first, again})
    assert was_queued == bool(queued) == (first >= QUEUED.index("queue"))
    at[0] = sender.last
    queued.clear()
    assert gate.drain(done(at[0]), 0.0) is None
    assert not sender.issue(queue)


def test_a_sender_queues_while_another_does(peer: Path, gate: Gate) -> None:
    first, second = sender_at(peer), sender_at(peer)
    inside = list[bool]()
    assert first.issue(lambda number: inside.append(second.issue(lambda number: None)))
    assert inside == [True]


def test_a_batch_that_was_refused_leaves_the_record_as_it_was(peer: Path, gate: Gate) -> None:
    sender = sender_at(peer)
    assert sender.issue(lambda number: None)
    assert gate.drain(done(1), 0.0) is None
    assert not sender.issue(lambda number: None)
    assert (gate.issued()[0], sender.last) == (1, 1)


def test_a_batch_of_which_only_some_may_be_queued_holds_the_peer_until_its_sender_says_what_is_done(
    peer: Path, gate: Gate
) -> None:
    sender = sender_at(peer)

    def fail(number: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate"):
        sender.issue(fail)
    assert gate.drain(done(0), 0.0) is not None
    sender.say(0)
    assert gate.drain(done(0), 0.0) is None


def test_numbers_begin_again_and_are_never_those_of_nothing(peer: Path, gate: Gate) -> None:
    seen = list[int]()
    sender = sender_at(peer)
    for _ in range(2 * ROUND):
        sender.issue(seen.append)
    assert (min(seen), max(seen)) == (1, ROUND - 1)
    assert all(a != b for a, b in pairwise(seen))


def test_who_takes_a_record_over_counts_on(peer: Path, gate: Gate) -> None:
    first = sender_at(peer)
    first.issue(lambda number: None)
    first.close()
    second = sender_at(peer)
    assert (second.at, second.last) == (first.at, 1)
    second.issue(lambda number: None)
    assert gate.drain(done(1), 0.0) is not None
    assert gate.drain(done(2), 0.0) is None


def test_no_two_senders_have_one_record_until_all_are_taken(peer: Path, gate: Gate) -> None:
    senders = [Sender.claim(peer) for _ in range(SENDERS)]
    assert [s.at for s in senders if s is not None] == list(range(SENDERS))
    assert Sender.claim(peer) is None
    assert len(open_files(peer.parent)) == 1 + 2 * SENDERS
    assert senders[7] is not None
    senders[7].close()
    again = Sender.claim(peer)
    assert again is not None
    assert again.at == 7
    for sender in senders:
        if sender is not None and sender is not senders[7]:
            sender.issue(lambda number: None)
    assert gate.issued() == [int(at != 7) for at in range(SENDERS)]
    gate.forget()
    assert list(peer.parent.iterdir()) == [peer]


def test_at_a_peer_that_closed_no_record_is_taken_and_no_file_stays_behind(peer: Path, gate: Gate) -> None:
    peer.unlink()
    assert Sender.claim(peer) is None  # just after it began to close
    gate.forget()
    assert Sender.claim(peer) is None
    assert (open_files(peer.parent), list(peer.parent.iterdir())) == ([], [])


def test_a_gate_has_its_space_from_the_start(peer: Path, gate: Gate) -> None:
    """Else a peer on a full file system could not say that it closed."""
    stat = peer.with_suffix(".gate").stat()
    assert stat.st_size > 0
    assert stat.st_blocks > 0


def test_nobody_but_their_owner_may_open_the_files(peer: Path, gate: Gate) -> None:
    sender_at(peer)
    assert {path.stat().st_mode & 0o777 for path in peer.parent.iterdir() if path != peer} == {0o600}


def test_a_lock_file_of_another_user_holds_nobody_up_and_proves_nothing(
    peer: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender_at(peer).issue(lambda number: None)

    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(ipc_records.os, "open", refuse)
        assert gate.drain(done(0), 0.05) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        gate.forget()


def test_copies_that_do_not_end_are_said_after_the_time_that_was_given(peer: Path, gate: Gate) -> None:
    sender_at(peer).issue(lambda number: None)
    reason = gate.drain(done(0), 0.05)
    assert reason is not None
    assert "1 senders have copies queued" in reason


HOLD = """
import sys, time
from pathlib import Path
from weight_sync.transport.ipc_records import Sender
sender = Sender.claim(Path(sys.argv[1]))
def queue(number):
    print(number, flush=True)
    INSIDE
sender.issue(queue)
time.sleep(60)
"""


@pytest.mark.parametrize("inside", ["pass", "time.sleep(60)"], ids=["behind the gate", "inside it"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_dead_senders_copies_are_not_waited_for_and_a_stopped_ones_are(
    peer: Path, gate: Gate, how: signal.Signals, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_records, "_DEAD_SECONDS", 0.2)
    hold = HOLD.replace("INSIDE", inside)
    with subprocess.Popen([sys.executable, "-c", hold, str(peer)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        reason = gate.drain(done(0), 0.3)
        assert reason is not None
        assert ("has not gone on" in reason) == (inside != "pass")
        os.kill(process.pid, how)
        begun = time.monotonic()
        reason = gate.drain(done(0), 1.0 if how is signal.SIGSTOP else 30.0)
        process.kill()
    assert (reason is None) == (how is signal.SIGKILL)
    assert time.monotonic() - begun >= 0.2


LET_GO = HOLD.replace("INSIDE", "pass").replace("time.sleep", "import os; os.close(sender.descriptor); time.sleep")
"""Its lock goes first, as where it is killed and has much else to close."""


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "in another container"])
def test_a_sender_whose_lock_is_gone_counts_as_alive_as_long_as_its_process_may_have_device_files_to_close(
    peer: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    monkeypatch.setattr(ipc_records, "_DEAD_SECONDS", 0.0)
    monkeypatch.setattr(ipc_records, "_UNSEEN_SECONDS", 0.0 if seen else 0.5)
    hold = LET_GO if seen else LET_GO.replace("import sys", "import os; os.readlink = lambda path: 'pid:[1]'; import sys", 1)
    with subprocess.Popen([sys.executable, "-c", hold, str(peer)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        time.sleep(0.2)
        assert gate.drain(done(0), 0.3) is not None
        if seen:
            process.kill()  # and not waited for: it is a zombie when it is looked at
        begun = time.monotonic()
        assert gate.drain(done(0), 30.0) is None
        assert seen or time.monotonic() - begun >= 0.5
        process.kill()


def test_a_sender_in_another_container_counts_as_alive_while_it_has_its_lock(
    peer: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_records, "_UNSEEN_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ipc_records.os, "readlink", lambda path: "pid:[1]")
        sender = sender_at(peer)
    sender.issue(lambda number: None)
    assert gate.drain(done(0), 0.05) is not None
    os.close(sender.descriptor)
    assert gate.drain(done(0), 30.0) is None
