"""What the cuda_ipc transport leaves behind where something fails: nothing that is mapped, and nobody who waits in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ipc_sides import LONG, SHORT, SOON, Side, open_files, raising, written
from ipc_support import Gpu

from weight_sync.device import ipc
from weight_sync.errors import BindError, TransportError
from weight_sync.transport import cuda_ipc
from weight_sync.transport.ipc_copies import Meeting

CUDA = RuntimeError("CUDA error: an illegal memory access was encountered")
FULL = OSError(28, "No space left on device")


def test_an_endpoint_without_a_probe_area_is_refused_and_nothing_of_it_stays_mapped(sides: tuple[Side, Side], gpu: Gpu) -> None:
    sender, peer = sides
    with pytest.raises(TransportError, match="no probe area"):
        sender.transport.probe(replace(peer.transport.describe(), probe=None), SOON)
    assert not gpu.opened


def test_where_one_of_a_peers_handles_cannot_be_opened_none_stays_mapped(
    sides: tuple[Side, Side], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, peer = sides
    opens = iter([gpu.open_handle, raising(BindError("opening a peer's CUDA IPC handle: CUDA_ERROR_OUT_OF_MEMORY (2)"))])
    monkeypatch.setattr(ipc, "open_handle", lambda handle: next(opens)(handle))
    with pytest.raises(BindError, match="OUT_OF_MEMORY"):
        sender.transport.probe(peer.transport.describe(), SOON)
    assert not gpu.opened


def test_a_peer_whose_driver_said_that_copies_were_queued_and_had_queued_none_is_written_to_by_the_kernel(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, peer = sides
    monkeypatch.setattr(ipc.CopyBatches, "queue", lambda self, stream: None)
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is None
    assert written(sender, peer) == LONG + SHORT
    peer.transport.close()


@pytest.mark.parametrize("error", [CUDA, KeyboardInterrupt()], ids=["CUDA", "interrupt"])
def test_a_sender_that_fails_to_meet_its_peer_parts_so_that_the_peer_need_not_wait(
    sides: tuple[Side, Side], gpu: Gpu, error: BaseException, tmp_path: Path
) -> None:
    sender, peer = sides
    sender.transport._engine.stream.ask(raising(error))  # before the word that it queues for the peer
    with pytest.raises(type(error)):
        sender.transport.probe(peer.transport.describe(), SOON)
    assert (gpu.opened, len(open_files(tmp_path))) == ([], 2)  # both gates
    peer.transport.close()


def test_a_sender_parts_with_a_peer_once_its_copies_are_done(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    sender.transport.write(sender.batch(peer, short=False))
    under_way = list[int]()
    monkeypatch.setattr(ipc, "close_handle", lambda address: under_way.append(len(sender.transport._engine.stream.queue)))
    sender.transport.probe(peer.transport.describe(), SOON)  # anew
    assert under_way == [0, 0]


@pytest.mark.parametrize(("error", "code"), [(CUDA, "cuda"), (BindError("no memory"), "cuda"), (FULL, "gate")])
def test_what_kept_a_write_from_being_queued_is_the_errors_code(
    sides: tuple[Side, Side], gpu: Gpu, error: Exception, code: str
) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    gpu.batch = raising(error)
    with pytest.raises(TransportError) as caught:
        sender.transport.write(sender.batch(peer))
    assert (caught.value.code, caught.value.__cause__) == (code, error)


def test_a_peer_that_cannot_say_that_it_closed_fails_as_a_transport_does(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = sides[1]
    monkeypatch.setattr(peer.transport._gate, "shut", raising(FULL))
    with pytest.raises(TransportError, match="No space left") as caught:
        peer.transport.close()
    assert caught.value.code == "gate"


def test_nothing_is_queued_for_a_peer_that_failed_to_close(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    batch = sender.batch(peer, short=False)
    monkeypatch.setattr(peer.transport, "_put", raising(CUDA))  # its epoch stays where it was
    with pytest.raises(TransportError, match="illegal memory access"):
        peer.transport.close()
    ticket = sender.transport.write(batch)
    with pytest.raises(TransportError, match="closed before copies were queued"):
        sender.transport.wait(ticket, SOON)
    assert (peer.buffer.array == 0).all()


def test_a_fork_closes_nothing_of_its_parents(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, peer = sides
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc.os, "getpid", lambda: peer.transport._pid + 1)
        with pytest.raises(TransportError) as caught:
            peer.transport.close()
    assert caught.value.code == "fork"
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is not None
    assert written(sender, peer) == LONG + SHORT


@pytest.mark.parametrize(("error", "code"), [(CUDA, "cuda"), (FULL, "gate")])
def test_who_cannot_part_with_one_peer_parts_with_the_others_and_says_so(
    sides: tuple[Side, Side], gpu: Gpu, error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, lost, other = *sides, Side(gpu, 0, "other")
    for peer in (lost, other):
        sender.transport.probe(peer.transport.describe(), SOON)
        assert written(sender, peer) == LONG + SHORT
    part, broken = sender.transport._engine.part, sender.meeting(lost)

    def fail(meeting: Meeting) -> None:
        raising(error)() if meeting is broken else part(meeting)

    monkeypatch.setattr(sender.transport._engine, "part", fail)
    with pytest.raises(TransportError) as caught:
        sender.transport.close()
    assert (caught.value.code, caught.value.__cause__) == (code, error)
    assert set(gpu.opened) == set(lost.transport._exported)
    assert not other.transport._file.with_suffix(".sender0").exists()
    other.transport.close()
