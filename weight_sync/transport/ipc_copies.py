"""What cuda_ipc leaves to the GPU's copy engines: long ranges, for which they carry more of a link than a kernel's stores do
(benchmarks/gpu_notes.md) and leave the multiprocessors to digests and quantisation. Their fence: ipc_records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import BindError
from weight_sync.transport.base import Batch
from weight_sync.transport.ipc_records import RECORD_BYTES, ROUND, SENDERS, Sender

COPY_FROM = 1 << 18
"""Bytes of a range from which on it is a copy engine's. On two H200 copies of 256 KB reach 389 GB/s, of 128 KB 245; our kernel
371 whatever their size."""
CALL_BYTES = 1 << 28
"""Bytes of one call to the driver: 1 GB in a call, in copies of 1 MB, was 2% slower."""
CALL_COPIES = 512
"""Copies of one call at most: calls of 50,000 small ones are reported to crash the process (vLLM's issue 49276)."""
NOT_FROM = 10
"""Compute capability (major) from which on copy engines are not used by themselves: their batches are reported to crash on
Blackwell (lmdeploy's pull request 4838, vLLM's issue 49276), and we have run none there."""
AREA_BYTES = SENDERS * RECORD_BYTES


def long_ranges(batch: Batch) -> NDArray[np.bool_]:
    """Which entries of a batch are contiguous on both sides and long."""
    long = batch.nbytes >= COPY_FROM
    if batch.boxes is None:
        return long
    shape = batch.boxes.shape
    inside = np.concatenate([shape[:, 1:], np.ones_like(shape[:, :1])], axis=1)[:, ::-1].cumprod(axis=1)[:, ::-1]
    for strides in (batch.boxes.local_strides, batch.boxes.remote_strides):
        long = long & ((shape == 1) | (strides == inside)).all(axis=1)
    return long


class CopyEngine:
    """A transport's queue of copies, on a stream of its own, and its words with its peers. One per transport."""

    def __init__(self, torch: Any, ipc: Any, kernels: Any, device: Any) -> None:
        self._torch, self._ipc, self._kernels, self._device = torch, ipc, kernels, device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device, priority=-1)
            self._control = torch.cuda.Stream(device, priority=-1)
            self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self._numbers = torch.arange(ROUND, dtype=torch.int64, device=device)
            torch.cuda.synchronize(device)  # before another stream reads the numbers

    def prepare(self, to: NDArray[np.int64], from_: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Any:
        return self._ipc.CopyBatches(to.tolist(), from_.tolist(), nbytes.tolist(), CALL_BYTES, CALL_COPIES)

    def meet(self, peer: Path, records: int) -> Meeting | None:
        """A record of ours at a peer, whose records lie from this address on; None where none is to be had or the driver has no
        batches of copies."""
        sender = Sender.claim(peer)
        if sender is None:
            return None
        at = records + RECORD_BYTES * sender.at
        meeting = Meeting(sender, at)
        with self._torch.cuda.device(self._device):
            sender.last = self._get(at)  # of who had it before
            number = sender.issue(lambda n: self._put(at, n), lambda: True)
            try:
                # Also proves that the driver has such batches, and that both numbers can be written.
                self.prepare(*(np.asarray([a], np.int64) for a in (at + 8, at, 8))).queue(self.stream)
                self.stream.synchronize()
                if self._get(at + 8) == number:
                    sender.owed = False
                    return meeting
            # Bindings before 12.8; a driver before it (bindings say RuntimeError); other arguments in bindings to come.
            except (AttributeError, BindError, RuntimeError, TypeError):
                pass
            self.part(meeting)
        return None

    def queue(self, meeting: Meeting, copies: Any, epoch_at: int, epoch: int) -> bool:
        """Queue copies unless the peer's epoch is gone. The caller has made `stream` wait for what comes before."""
        number = meeting.sender.issue(lambda n: self._put(meeting.at, n), lambda: self._get(epoch_at) == epoch)
        if number:
            if number % (ROUND // 2) == 1:  # else issued could come round to a done that is many batches old
                self.stream.synchronize()
            copies.queue(self.stream)
            self._ipc.copy_later(meeting.at + 8, self._numbers.data_ptr() + 8 * number, 8, self.stream)
            meeting.sender.owed = False
        return bool(number)

    def part(self, meeting: Meeting) -> None:
        self.stream.synchronize()
        if meeting.sender.owed:  # something failed half way; now nothing is queued any more, and the peer need not wait for it
            for address in (meeting.at + 8, meeting.at):
                self._put(address, meeting.sender.last)
        meeting.sender.close()

    def _put(self, address: int, value: int) -> None:
        """Returns when it stands there."""
        self._word[0] = value
        self._move(address, self._word.data_ptr())

    def _get(self, address: int) -> int:
        self._move(self._word.data_ptr(), address)
        return int(self._word[0])

    def _move(self, to: int, from_: int) -> None:
        with self._torch.cuda.stream(self._control):
            self._kernels.launch_word(to, from_)
        self._control.synchronize()


class Meeting:
    """Our record at one peer. at: its address here."""

    def __init__(self, sender: Sender, at: int) -> None:
        self.sender, self.at = sender, at
