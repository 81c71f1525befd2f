"""Copies that are queued for another process's GPU memory, and that process's close(). Needs CUDA: run by hand, not in CI.

The sender is a process of its own, so that it can be stopped and killed.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/gpu needs torch with CUDA")
if not torch.cuda.is_available():
    pytest.skip("tests/gpu needs a CUDA device", allow_module_level=True)

from weight_sync.errors import TransportError  # noqa: E402
from weight_sync.ids import Deadline  # noqa: E402
from weight_sync.transport.base import Batch, Endpoint, Region  # noqa: E402
from weight_sync.transport.cuda_ipc import CudaIpcTransport  # noqa: E402

NBYTES = 64 << 20
SHORT = 1 << 12  # bytes of a range that is the kernel's
CYCLES_PER_SECOND = 1_800_000_000  # of an H200; of another GPU a second is a little longer or shorter


def send(connection: Any) -> None:
    """Write so many bytes behind so many seconds of other work, each time this is asked for."""
    import torch

    torch.cuda.set_device(0)
    tensor = torch.full((NBYTES,), 7, dtype=torch.uint8, device="cuda")
    transport = CudaIpcTransport()
    transport.register([Region(tensor.data_ptr(), NBYTES)])
    endpoint, address = connection.recv()
    transport.probe(Endpoint.from_json(endpoint), Deadline.after(60))
    (peer,) = transport._peers.values()
    connection.send(peer.meeting is not None)
    while (asked := connection.recv()) is not None:
        seconds, nbytes = asked
        numbers = (np.asarray([n], np.int64) for n in (tensor.data_ptr(), address, nbytes))
        batch = Batch(Endpoint.from_json(endpoint), *numbers, ["w"])
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        ticket = transport.write(batch)
        connection.send("queued")
        try:
            transport.wait(ticket, Deadline.after(60))
            connection.send("written")
        except TransportError as error:
            connection.send(error.code)


class Pair:
    def __init__(self) -> None:
        torch.cuda.set_device(torch.cuda.device_count() - 1)
        self.tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        self.transport = CudaIpcTransport()
        self.transport.register([Region(self.tensor.data_ptr(), NBYTES)])
        context = mp.get_context("spawn")
        self.there, child = context.Pipe()
        self.process = context.Process(target=send, args=(child,), daemon=True)
        self.process.start()
        self.there.send((self.transport.describe().to_json(), self.tensor.data_ptr()))
        assert self.said() is True, "no copy engine: a driver before 12.8?"

    def said(self) -> Any:
        assert self.there.poll(120), "the sender says nothing"
        return self.there.recv()

    def queue(self, seconds: float, nbytes: int = NBYTES) -> None:
        self.there.send((seconds, nbytes))
        assert self.said() == "queued"

    def written(self) -> int:
        torch.cuda.synchronize()
        return int((self.tensor == 7).sum())


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    os.kill(made.process.pid or 0, signal.SIGCONT) if made.process.is_alive() else None
    made.process.kill()
    made.process.join()


def test_a_copy_of_the_copy_engine_arrives_whole(pair: Pair) -> None:
    pair.queue(0)
    assert pair.said() == "written"
    assert pair.written() == NBYTES


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_who_closes_waits_for_copies_that_were_queued_also_by_a_process_that_was_stopped_since(
    pair: Pair, stopped: bool
) -> None:
    pair.queue(1.5)
    if stopped:
        os.kill(pair.process.pid or 0, signal.SIGSTOP)
    begun = time.monotonic()
    pair.transport.close()
    assert time.monotonic() - begun > 0.7
    assert pair.written() == NBYTES
    pair.tensor.zero_()
    time.sleep(1.0)
    assert pair.written() == 0


def test_nothing_of_a_killed_senders_copies_arrives_after_close(pair: Pair) -> None:
    pair.queue(8)
    pair.process.kill()
    begun = time.monotonic()
    pair.transport.close()
    assert time.monotonic() - begun < 15
    pair.tensor.zero_()
    time.sleep(8)
    assert pair.written() == 0


def test_nothing_is_queued_for_a_peer_that_closed(pair: Pair) -> None:
    pair.transport.close()
    pair.queue(0)
    assert pair.said() == "closed peer"
    assert pair.written() == 0


def test_a_kernel_that_is_asked_for_after_its_peer_closed_finds_no_epoch_in_memory_of_others(pair: Pair) -> None:
    """It looks for one where the peer had it, so that memory must never be another's."""
    size, epoch = pair.transport._area.numel(), pair.transport._epoch
    pair.transport.close()
    del pair.transport
    gc.collect()
    others = [torch.full((size // 8,), epoch, dtype=torch.int64, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    pair.queue(0, SHORT)
    assert pair.said() == "closed peer"
    assert pair.written() == 0
    assert all(bool((other == epoch).all()) for other in others)
