"""The one thread that talks to a Mooncake engine: feeds writes to it in bounded windows and polls them.

Mooncake's calls have no deadline of their own (opening a silent peer blocks for 60 s, a stopped peer for longer), so the
callers wait on an event with their deadline while this thread does the calls, all of which release the GIL.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from weight_sync.transport.regions import Array


@dataclass(frozen=True, slots=True)
class Tuning:
    """How writes are fed to the engine.

    piece: writes longer than this many bytes are cut. window: requests in flight to one peer; above about 2,050 the tcp
    transport fails them at once. window_bytes: bytes in flight to one peer. batched: hand `window` requests at a time to
    the engine's blocking batch call, which is right for local device copies only (it spins, and cannot be left early).
    """

    piece: int
    window: int
    window_bytes: int
    batched: bool


# Medians in GB/s on 2 cores, tcp over loopback, Mooncake 0.3.13.post1, 512 MB as | one write | 1 MB | 64 KB pieces:
#   engine's blocking batch call   1.85 | 1.92 | 1.30   spins a core: 0.7 - 1.2 CPU seconds for each GB
#   submit and poll, as here       3.13 | 2.53 | 1.24   0.35 - 1.1
#   submit and poll, one write uncut and alone 1.91; 1 MB one at a time 0.82; 64 KB with a window of 16 0.74
# Asynchronous batches: 1.96 for 1 MB, and their status can only be had by a call that blocks. On busy cores everything
# is slower, and polling keeps twice the rate of spinning. Cut sizes from 4 to 64 MB and 64 or 256 MB in flight do not
# differ beyond the noise; a window below some 100 requests hurts small writes. rdma and nvlink_intra: not measured here;
# nvlink_intra follows what was seen on 2 x H200 (one uncut copy 393 GB/s, 64 MB cuts 388).
TUNING: dict[str, Tuning] = {
    "tcp": Tuning(piece=16 << 20, window=1024, window_bytes=256 << 20, batched=False),
    "rdma": Tuning(piece=64 << 20, window=1024, window_bytes=1 << 30, batched=False),
    "nvlink_intra": Tuning(piece=1 << 40, window=1024, window_bytes=1 << 60, batched=True),
}


@dataclass(slots=True, eq=False)
class Flight:
    """One batch on its way to one peer, or with `reads` from it. `finished` is set once it has succeeded or failed.

    failed: index of the piece that failed, or None; code: what the engine said about it. done: pieces reported complete.
    """

    session: str
    local: list[int]
    remote: list[int]
    nbytes: list[int]
    parent: Array
    reads: bool = False
    next: int = 0
    done: int = 0
    inflight: deque[tuple[int, int]] = field(default_factory=deque)
    failed: int | None = None
    code: int | str = 0
    finished: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def finish(self, failed: int | None = None, code: int | str = 0) -> None:
        self.failed, self.code, self.seconds = failed, code, time.monotonic() - self.started
        self.finished.set()


class Pump:
    """Owns the engine. `stop` is the fence: once it has returned True the engine is gone."""

    def __init__(self, engine: Any, tuning: Tuning, poll_seconds: float) -> None:
        self._engine: Any = engine
        self._tuning = tuning
        self._poll = poll_seconds
        self._ready = threading.Condition()
        self._queue: deque[Flight] = deque()
        self._stopping = False
        self._requests: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        # Daemon: a thread stuck in a native call must not keep a finished program alive.
        self._thread = threading.Thread(target=self._run, name="weight-sync-mooncake", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Any:
        return self._engine

    def submit(self, flight: Flight) -> None:
        with self._ready:
            self._queue.append(flight)
            self._ready.notify()

    def stop(self, seconds: float) -> bool:
        """Stop feeding, leave what is in flight, delete the engine. False if a native call did not return in `seconds`."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._engine = None
        return True

    def _run(self) -> None:
        active: list[Flight] = []
        while True:
            with self._ready:
                while not (self._queue or active or self._stopping):
                    self._ready.wait()
                if self._stopping:
                    return
                active.extend(self._queue)
                self._queue.clear()
            progressed = False
            for flight in active:
                try:
                    progressed |= self._advance(flight)
                except Exception as error:  # noqa: BLE001 - wait() reports it; without this it would look like a timeout
                    flight.finish(failed=flight.done, code=f"{type(error).__name__}: {error}")
            active = [flight for flight in active if not flight.finished.is_set()]
            if active and not progressed:
                time.sleep(self._poll)

    def _advance(self, flight: Flight) -> bool:
        if self._tuning.batched:
            return self._advance_batched(flight)
        fed = self._feed(flight)
        return self._collect(flight) or fed

    def _feed(self, flight: Flight) -> bool:
        session, first = flight.session, flight.next
        requests, inflight_bytes = self._requests.get(session, 0), self._bytes.get(session, 0)
        while flight.next < len(flight.nbytes) and requests < self._tuning.window:
            index, nbytes = flight.next, flight.nbytes[flight.next]
            if requests and inflight_bytes + nbytes > self._tuning.window_bytes:
                break
            if flight.reads:
                handle = self._engine.batch_transfer_async_read(
                    session, [flight.local[index]], [flight.remote[index]], [nbytes]
                )
            else:
                handle = self._engine.transfer_submit_write(session, flight.local[index], flight.remote[index], nbytes)
            if handle in (0, -1, (1 << 64) - 1):  # builds differ in how they say that submitting failed
                flight.finish(failed=index, code="not submitted")
                return True
            flight.inflight.append((handle, index))
            flight.next += 1
            requests += 1
            inflight_bytes += nbytes
        self._requests[session], self._bytes[session] = requests, inflight_bytes
        return flight.next > first

    def _collect(self, flight: Flight) -> bool:
        """Poll from the oldest; stop at the first one still on its way, so a sweep costs what has completed."""
        check, inflight, session = self._engine.transfer_check_status, flight.inflight, flight.session
        before = flight.done
        while inflight and not flight.finished.is_set():
            handle, index = inflight[0]
            status = check(handle)
            if status == 0:
                break
            inflight.popleft()
            self._requests[session] -= 1
            self._bytes[session] -= flight.nbytes[index]
            if status != 1:
                flight.finish(failed=index, code=status)
                return True
            flight.done += 1
        if flight.done == len(flight.nbytes):
            flight.finish()
        return flight.done > before

    def _advance_batched(self, flight: Flight) -> bool:
        part = slice(flight.next, flight.next + self._tuning.window)
        call = self._engine.batch_transfer_sync_read if flight.reads else self._engine.batch_transfer_sync_write
        status = call(flight.session, flight.local[part], flight.remote[part], flight.nbytes[part])
        if status != 0:
            flight.finish(failed=flight.next, code=status)
            return True
        flight.next = flight.done = min(part.stop, len(flight.nbytes))
        if flight.done == len(flight.nbytes):
            flight.finish()
        return True
