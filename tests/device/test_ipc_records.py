"""The fence of queued copies: whoever closes its memory waits for what was queued for it, and nothing is queued afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.transport import ipc_copies, ipc_records
from weight_sync.transport.base import Batch, Boxes, Endpoint
from weight_sync.transport.ipc_copies import long_ranges
from weight_sync.transport.ipc_records import ROUND, SENDERS, Sender, drain, forget


class Peer:
    """The memory of a peer, and what is queued for it."""

    def __init__(self) -> None:
        self.epoch, self.issued, self.done, self.queued = True, 0, 0, 0

    def records(self) -> list[tuple[int, int]]:
        return [(self.issued, self.done)]

    def say(self, number: int) -> None:
        self.issued = number


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    path = tmp_path / "weight_sync-ipc-peer"
    path.touch()
    return path


@pytest.mark.parametrize(("epoch_goes", "looked"), list(combinations_with_replacement(range(6), 2)))
def test_whenever_the_peer_closes_it_either_waits_for_the_copies_or_they_are_never_queued(
    peer: Path, epoch_goes: int, looked: int
) -> None:
    there, sender, drained = Peer(), Sender.claim(peer), list[bool]()
    assert sender is not None

    def between(step: int) -> None:
        """What the peer does just before this step of the sender."""
        if step == epoch_goes:
            there.epoch = False
        if step == looked:
            drained.append(drain(peer, there.records, 0.0) is None)
            assert not (drained[0] and there.queued)

    def say(number: int) -> None:
        if number != before:
            between(0)
        there.say(number)

    def look() -> bool:
        between(1)
        found = there.epoch
        between(2)
        return found

    before = sender.last
    number = sender.issue(say, look)
    if number:
        between(3)
        there.queued += 1
        assert not (drained and drained[0]), "queued after the peer had closed"
        between(4)
        there.queued, there.done = 0, number
    else:
        assert not there.epoch
        assert there.issued == there.done
    between(5)
    sender.close()


def test_a_batch_that_was_refused_leaves_the_record_as_it_was(peer: Path) -> None:
    there, sender = Peer(), Sender.claim(peer)
    assert sender is not None
    there.done = sender.issue(there.say, lambda: True)
    there.epoch = False
    assert sender.issue(there.say, lambda: there.epoch) == 0
    assert (there.issued, there.done, sender.last) == (1, 1, 1)


def test_numbers_begin_again_and_are_never_those_of_nothing(peer: Path) -> None:
    there, sender = Peer(), Sender.claim(peer)
    assert sender is not None
    seen = [sender.issue(there.say, lambda: True) for _ in range(2 * ROUND)]
    assert (min(seen), max(seen)) == (1, ROUND - 1)
    assert all(a != b for a, b in pairwise(seen))


def test_no_two_senders_have_one_record_until_all_are_taken(peer: Path) -> None:
    senders = [Sender.claim(peer) for _ in range(SENDERS)]
    assert [s.at for s in senders if s is not None] == list(range(SENDERS))
    assert Sender.claim(peer) is None
    assert senders[7] is not None
    senders[7].close()
    again = Sender.claim(peer)
    assert again is not None
    assert again.at == 7
    forget(peer)
    assert list(peer.parent.iterdir()) == [peer]


def test_at_a_peer_that_closed_no_record_is_taken_and_no_file_stays_behind(peer: Path) -> None:
    peer.unlink()
    forget(peer)
    assert Sender.claim(peer) is None
    assert not list(peer.parent.iterdir())


def test_a_lock_file_of_another_user_holds_nobody_up_and_proves_nothing(peer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender.claim(peer)
    assert sender is not None

    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(ipc_records.os, "open", refuse)
        assert drain(peer, lambda: [(1, 0)], 0.05) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        forget(peer)


def test_copies_that_do_not_end_are_said_after_the_time_that_was_given(peer: Path) -> None:
    sender = Sender.claim(peer)
    assert sender is not None
    reason = drain(peer, lambda: [(2, 1)], 0.05)
    assert reason is not None
    assert "1 senders have copies queued" in reason
    sender.close()


HOLD = """
import sys, time
from pathlib import Path
from weight_sync.transport.ipc_records import Sender
sender = Sender.claim(Path(sys.argv[1]))
print(sender.at, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_dead_senders_copies_are_not_waited_for_and_a_stopped_ones_are(
    peer: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_records, "_DEAD_SECONDS", 0.2)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(peer)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        assert drain(peer, lambda: [(1, 0)], 0.3) is not None
        os.kill(process.pid, how)
        begun = time.monotonic()
        reason = drain(peer, lambda: [(1, 0)], 1.0 if how is signal.SIGSTOP else 30.0)
        process.kill()
    assert (reason is None) == (how is signal.SIGKILL)
    assert time.monotonic() - begun >= 0.2


LET_GO = HOLD.replace("time.sleep", "import os; os.close(sender.descriptor); time.sleep")
"""Its lock goes first, as where it is killed and has much else to close."""


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "in another container"])
def test_a_sender_whose_lock_is_gone_counts_as_alive_as_long_as_its_process_may_have_device_files_to_close(
    peer: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    monkeypatch.setattr(ipc_records, "_DEAD_SECONDS", 0.0)
    monkeypatch.setattr(ipc_records, "_UNSEEN_SECONDS", 0.5)
    hold = LET_GO if seen else LET_GO.replace("import sys", "import os; os.readlink = lambda path: 'pid:[1]'; import sys", 1)
    with subprocess.Popen([sys.executable, "-c", hold, str(peer)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(0.2)
        assert drain(peer, lambda: [(1, 0)], 0.3) is not None
        if seen:
            process.kill()  # and not waited for: it is a zombie when it is looked at
        begun = time.monotonic()
        assert drain(peer, lambda: [(1, 0)], 30.0) is None
        assert seen or time.monotonic() - begun >= 0.5
        process.kill()


@settings(deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 64]), min_size=1, max_size=3),
    widen=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    side=st.booleans(),
    itemsize=st.sampled_from([1, 2, 64]),
)
def test_only_ranges_that_lie_in_one_piece_on_both_sides_are_a_copy_engines(
    shape: list[int], widen: list[int], side: bool, itemsize: int
) -> None:
    dims, strides, step = [*shape, itemsize], [], 1
    for size, more in zip(dims[::-1], [0, *widen], strict=False):
        strides.insert(0, step)
        step *= size + more
    plain = [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]
    both = (np.asarray([strides]), np.asarray([plain]))
    nbytes = np.asarray([int(np.prod(dims))])
    boxes = Boxes(np.asarray([dims]), *(both if side else both[::-1]))
    batch = Batch(Endpoint("cuda_ipc", "cuda_ipc", "file@boot", 1), nbytes, nbytes, nbytes, ["w"], boxes)
    at = np.add.reduce(np.meshgrid(*(np.arange(n) * s for n, s in zip(dims, strides, strict=True)), indexing="ij")).reshape(-1)
    one_piece = bool((np.diff(at) == 1).all())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc_copies, "COPY_FROM", 256)
        assert long_ranges(batch).tolist() == [one_piece and int(nbytes[0]) >= 256]
