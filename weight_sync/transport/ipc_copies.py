"""What cuda_ipc leaves to the GPU's copy engines: long ranges, for which they carry more of a link than a kernel's stores do
(benchmarks/gpu_notes.md) and leave the multiprocessors to digests and quantisation. Their fence: ipc_records.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, torch: Any, ipc: Any, device: Any) -> None:
        self._torch, self._ipc, self._device = torch, ipc, device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device, priority=-1)
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
        meeting = Meeting(sender, records + RECORD_BYTES * sender.at)
        with self._torch.cuda.device(self._device):
            try:
                # Also proves that the driver has such batches.
                issued = sender.issue(lambda number: self._prepared_word(meeting.at, number).queue(self.stream))
                self.stream.synchronize()
                if issued and self._done(meeting) == sender.last:
                    return meeting
                sender.owed = issued
            except (AttributeError, TypeError, BindError, OSError):  # other bindings, an older driver, no more locks
                pass
            except BaseException:
                self.part(meeting)
                raise
            self.part(meeting)
        return None

    def queue(self, meeting: Meeting, copies: Any, before: Sequence[Any]) -> bool:
        """Queue copies behind these events, unless the peer has closed."""
        if meeting.sender.next % (ROUND // 2) == 1:  # else issued could come round to a done that is many batches old
            self.stream.synchronize()
        for event in before:
            self.stream.wait_event(event)

        def queue(number: int) -> None:
            copies.queue(self.stream)
            self._ipc.copy_later(meeting.at, self._number(number), RECORD_BYTES, self.stream)

        return meeting.sender.issue(queue)

    def part(self, meeting: Meeting) -> None:
        """Where this fails, the record stays ours until this process ends."""
        sender = meeting.sender
        self.stream.synchronize()
        if sender.owed:  # something failed half way. Now nothing is queued any more, and the peer need not wait for it
            sender.say(self._done(meeting))
        sender.close()

    def _prepared_word(self, to: int, number: int) -> Any:
        return self.prepare(*(np.asarray([a], np.int64) for a in (to, self._number(number), RECORD_BYTES)))

    def _number(self, number: int) -> int:
        return int(self._numbers.data_ptr()) + RECORD_BYTES * number

    def _done(self, meeting: Meeting) -> int:
        here = self._torch.zeros(1, dtype=self._torch.int64)
        self._ipc.copy(here.data_ptr(), meeting.at, RECORD_BYTES, self._device)
        return int(here[0])


class Meeting:
    """Our record at one peer. at: address here of its done."""

    def __init__(self, sender: Sender, at: int) -> None:
        self.sender, self.at = sender, at
