"""The cuda_ipc transport over a double of GPU and driver (ipc_support): what it asks for, in which order, and what is left of a
fence when something fails. tests/gpu has the same transport on real ones."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ipc_sides import LONG, SHORT, SOON, Side, open_files, raising, written
from ipc_support import Gpu, Stream

from weight_sync.errors import BindError, TransportError
from weight_sync.transport import cuda_ipc, ipc_copies, ipc_records
from weight_sync.transport.base import Batch, Endpoint


def test_long_ranges_go_by_copy_engines_and_short_ones_by_the_kernel(sides: tuple[Side, Side], gpu: Gpu) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is not None
    assert written(sender, peer) == LONG + SHORT
    assert (peer.buffer.array == 7).all()
    peer.transport.close()
    sender.transport.close()
    assert (gpu.strayed, gpu.opened) == ([], [])


@pytest.mark.parametrize(
    ("major", "wanted", "used"), [(9, None, True), (9, False, False), (10, None, False), (12, None, False), (10, True, True)]
)
def test_copy_engines_are_used_before_blackwell_and_where_the_config_says_so(
    sides: tuple[Side, Side], gpu: Gpu, major: int, wanted: bool | None, used: bool
) -> None:
    gpu.capability = major, 0
    sender, peer = Side(gpu, 7, "another", wanted), sides[1]
    sender.transport.probe(peer.transport.describe(), SOON)
    assert (sender.meeting(peer) is not None) == used
    assert written(sender, peer) == LONG + SHORT
    assert (peer.buffer.array == 7).all()


@pytest.mark.parametrize("long", [True, False], ids=["copies", "kernel"])
@pytest.mark.parametrize("filled", ["default", "current"])
def test_what_a_callers_stream_still_does_to_the_local_bytes_comes_first(
    sides: tuple[Side, Side], gpu: Gpu, filled: str, long: bool
) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    streams = {"default": gpu.cuda.default_stream(0), "current": Stream(gpu, 0)}
    streams[filled].ask(lambda: sender.buffer.array.fill(9))
    batch = sender.batch(peer, long=long, short=not long)
    with gpu.cuda.stream(streams["current"]):
        ticket = sender.transport.write(batch)
    nbytes = sender.transport.wait(ticket, SOON).nbytes
    assert int((peer.buffer.array == 9).sum()) == nbytes


def test_reads_are_the_kernels(sides: tuple[Side, Side]) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    issued = peer.transport._gate.issued()
    sender.transport.wait(sender.transport.read(sender.batch(peer)), SOON)
    assert (sender.buffer.array == 0).all()
    assert peer.transport._gate.issued() == issued


def test_a_record_says_that_its_copies_are_done_once_all_have_arrived(sides: tuple[Side, Side]) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    sender.transport.write(sender.batch(peer, short=False))
    stream = sender.transport._engine.stream
    while stream.queue:
        stream.step()
        arrived = (peer.buffer.array[:LONG] == 7).all()
        assert arrived or peer.transport._gate.issued() != peer.transport._done()
    assert peer.transport._gate.issued() == peer.transport._done()


def test_every_sender_of_a_peer_has_a_record_of_its_own(sides: tuple[Side, Side], gpu: Gpu) -> None:
    *senders, peer = Side(gpu, 5, "another"), *sides
    for sender in senders:
        sender.transport.probe(peer.transport.describe(), SOON)
        assert written(sender, peer) == LONG + SHORT
    peer.transport.close()


def test_once_both_have_closed_no_file_is_open_and_none_is_left(sides: tuple[Side, Side], tmp_path: Path) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    assert len(open_files(tmp_path)) == 4  # both gates, the peer's once more and a record at it
    sender.transport.close()
    peer.transport.close()
    assert (open_files(tmp_path), list(tmp_path.iterdir())) == ([], [])


def test_a_peer_does_not_close_before_what_was_queued_for_it_is_done(sides: tuple[Side, Side], gpu: Gpu) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    gpu.stuck.add(sender.transport._engine.stream)
    sender.transport.write(sender.batch(peer))
    with pytest.raises(TransportError, match="1 senders have copies queued"):
        peer.transport.close()


def test_what_a_sender_asks_for_after_its_peer_closed_reaches_no_memory_of_others(sides: tuple[Side, Side], gpu: Gpu) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    batch = sender.batch(peer)
    peer.transport.close()
    del peer.transport
    gc.collect()
    ticket = sender.transport.write(batch)
    with pytest.raises(TransportError, match="the peer closed"):
        sender.transport.wait(ticket, SOON)
    assert (peer.buffer.array == 0).all()
    assert not gpu.strayed


@pytest.mark.parametrize("queued", [0, 1], ids=["nothing", "half"])
def test_a_write_that_cannot_be_queued_poisons_its_transport_and_its_peer_closes_once_it_is_closed(
    sides: tuple[Side, Side], gpu: Gpu, queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    calls = iter(range(10))

    def fail() -> None:
        if next(calls) >= queued:
            raise BindError("queueing a batch of 2 copies: CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(ipc_copies, "COPY_FROM", half := LONG // 2)
    at, sizes = np.asarray([0, half]), np.asarray([half, half])
    batch = Batch(peer.transport.describe(), sender.buffer.data_ptr() + at, peer.buffer.data_ptr() + at, sizes, ["a", "b"])
    gpu.batch = fail
    with pytest.raises(TransportError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        sender.transport.write(batch)
    with pytest.raises(TransportError, match="poisoned"):
        sender.transport.write(sender.batch(peer))
    sender.transport.close()
    assert int((peer.buffer.array == 7).sum()) == half * queued
    peer.transport.close()


@pytest.mark.parametrize(
    "error",
    [
        BindError("queueing a batch of 1 copies: CUDA_ERROR_NOT_SUPPORTED (801)"),
        AttributeError("module has no attribute 'CUmemcpyAttributes'"),
        TypeError("cuGetProcAddress() takes exactly 4 positional arguments (3 given)"),
        OSError(28, "No space left on device"),
    ],
    ids=["no support", "old bindings", "other bindings", "full file system"],
)
def test_where_the_driver_has_no_batches_everything_is_the_kernels(
    sides: tuple[Side, Side], gpu: Gpu, error: Exception
) -> None:
    sender, peer = sides
    gpu.batch = raising(error)
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is None
    assert written(sender, peer) == LONG + SHORT
    assert (peer.buffer.array == 7).all()
    peer.transport.close()
    sender.transport.close()


def test_where_no_lock_can_be_had_everything_is_the_kernels(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, peer = sides
    refuse = raising(OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(ipc_records, "os", SimpleNamespace(**{**vars(ipc_records.os), "open": refuse}))
        sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is None
    assert written(sender, peer) == LONG + SHORT


def test_to_a_peer_that_keeps_no_records_nothing_goes_by_copy_engines(sides: tuple[Side, Side]) -> None:
    """Of an older library: it would not wait for them, and other memory may lie behind its area."""
    sender, peer = sides
    file = peer.transport._file
    file.write_text(json.dumps(json.loads(file.read_text()) | {"records": ipc_records.PROTOCOL - 1}))
    records = peer.transport._area.array[cuda_ipc.AREA_BYTES :]
    records[:] = 9
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is None
    assert written(sender, peer) == LONG + SHORT
    assert (records == 9).all()


def test_a_peer_that_was_probed_again_in_vain_is_written_to_no_more_and_nothing_of_it_stays_mapped(
    sides: tuple[Side, Side], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    assert written(sender, peer) == LONG + SHORT
    with monkeypatch.context() as patch:
        patch.setattr(sender.transport._engine, "meet", raising(RuntimeError("CUDA error: out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            sender.transport.probe(peer.transport.describe(), SOON)
    assert not gpu.opened
    with pytest.raises(TransportError, match="never probed"):
        sender.transport.write(sender.batch(peer))
    sender.transport.probe(peer.transport.describe(), SOON)
    assert written(sender, peer) == LONG + SHORT


def test_a_thread_on_another_device_meets_its_peer_on_the_transports(sides: tuple[Side, Side], gpu: Gpu) -> None:
    sender, peer = sides
    gpu.device = 1
    sender.transport.probe(peer.transport.describe(), SOON)
    assert sender.meeting(peer) is not None
    assert written(sender, peer) == LONG + SHORT
    assert gpu.device == 1


def test_however_many_batches_are_under_way_a_record_says_so(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ipc_copies, ipc_records):
        monkeypatch.setattr(module, "ROUND", 8)
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    batch, stream = sender.batch(peer, short=False), sender.transport._engine.stream
    for _ in range(40):
        sender.transport.write(batch)
        assert stream.queue
        assert peer.transport._gate.issued()[0] != peer.transport._done()[0]


def test_a_peer_may_close_while_a_sender_waits_for_its_earlier_copies(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ipc_copies, ipc_records):
        monkeypatch.setattr(module, "ROUND", 8)
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    batch = sender.batch(peer, short=False)
    for _ in range(3):
        sender.transport.write(batch)
    sender.transport._engine.stream.ask(peer.transport.close)
    ticket = sender.transport.write(batch)  # number 5: it waits for what it wrote before
    with pytest.raises(TransportError, match="closed before copies were queued"):
        sender.transport.wait(ticket, SOON)


def test_batches_are_prepared_anew_for_a_peer_that_was_probed_again(sides: tuple[Side, Side]) -> None:
    sender, peer = sides
    sender.transport.probe(peer.transport.describe(), SOON)
    batch = sender.batch(peer)
    sender.transport.wait(sender.transport.write(batch), SOON)
    before = sender.transport._prepared[batch][False]
    sender.transport.probe(Endpoint.from_json(peer.transport.describe().to_json()), SOON)
    assert batch not in sender.transport._prepared
    sender.transport.wait(sender.transport.write(batch), SOON)
    assert sender.transport._prepared[batch][False] is not before
