"""The feeding thread against an engine of our own making, which says how much was in flight and fails on demand."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from weight_sync.transport.mooncake_pump import Flight, Pump, Tuning


class Engine:
    """Completes each write at its second look. `bad`: source addresses that fail; `refuse`: that cannot be submitted."""

    def __init__(self, bad: int | None = None, refuse: int | None = None) -> None:
        self.bad, self.refuse = bad, refuse
        self.flying: dict[int, tuple[str, int, int]] = {}
        self.looks: dict[int, int] = {}
        self.most: dict[str, tuple[int, int]] = {}
        self.order: list[int] = []
        self.depths: list[int] = []

    def transfer_submit_write(self, session: str, source: int, destination: int, nbytes: int) -> int:
        if source == self.refuse:
            return 0
        handle = len(self.order) + 1
        self.order.append(source)
        self.flying[handle] = (session, source, nbytes)
        here = [n for s, _, n in self.flying.values() if s == session]
        self.depths.append(len(here))
        count, size = self.most.get(session, (0, 0))
        self.most[session] = (max(count, len(here)), max(size, sum(here)))
        return handle

    def batch_transfer_async_read(self, session: str, local: list[int], remote: list[int], nbytes: list[int]) -> int:
        assert len(local) == len(remote) == len(nbytes) == 1, "one handle for each piece"
        return self.transfer_submit_write(session, local[0], remote[0], nbytes[0])

    def transfer_check_status(self, handle: int) -> int:
        self.looks[handle] = self.looks.get(handle, 0) + 1
        if self.looks[handle] < 2:
            return 0
        _, source, _ = self.flying.pop(handle)
        return -1 if source == self.bad else 1


def flight(session: str, count: int, nbytes: int, first: int = 0) -> Flight:
    at = [first + i for i in range(count)]
    return Flight(session, at, at, [nbytes] * count, np.arange(count))


def run(engine: Engine, *flights: Flight, window: int = 10, window_bytes: int = 10_000) -> None:
    pump = Pump(engine, Tuning(piece=1 << 30, window=window, window_bytes=window_bytes, batched=False), 0.0001)
    for each in flights:
        pump.submit(each)
    for each in flights:
        assert each.finished.wait(30), "the pump did not finish"
    assert pump.stop(30)
    assert pump.engine is None


def test_no_more_requests_are_in_flight_to_one_peer_than_the_window_allows_over_all_its_batches() -> None:
    engine = Engine()
    run(engine, flight("a", 200, 1), flight("a", 200, 1, first=1000), flight("b", 50, 1, first=5000), window=7)
    assert (engine.most["a"][0], engine.most["b"][0]) == (7, 7)
    assert len(engine.order) == 450


def test_no_more_bytes_are_in_flight_to_one_peer_than_allowed_but_one_write_always_is() -> None:
    engine = Engine()
    run(engine, flight("a", 50, 300), flight("b", 3, 5000, first=900), window_bytes=1000)
    assert engine.most == {"a": (3, 900), "b": (1, 5000)}
    assert engine.depths.count(3) >= 16, "the window is used again for every few writes that complete"


def test_a_failed_piece_is_named_with_the_engines_code() -> None:
    failed, fine = flight("a", 40, 1), flight("b", 40, 1, first=500)
    run(Engine(bad=23), failed, fine)
    assert (failed.failed, failed.code) == (23, -1)
    assert (fine.failed, fine.done) == (None, 40)


def test_a_piece_that_cannot_be_submitted_is_named() -> None:
    failed = flight("a", 40, 1)
    run(Engine(refuse=31), failed)
    assert (failed.failed, failed.code) == (31, "not submitted")


def test_stopping_gives_up_waiting_when_the_engine_does_not_come_back() -> None:
    inside, release = threading.Event(), threading.Event()

    class Stuck(Engine):
        def transfer_submit_write(self, *_: Any) -> int:
            inside.set()
            release.wait(30)
            return 0

    pump = Pump(Stuck(), Tuning(1, 1, 1, False), 0.0001)
    pump.submit(flight("a", 1, 1))
    assert inside.wait(30)
    assert not pump.stop(0.2)
    release.set()
    assert pump.stop(30)


@pytest.mark.parametrize("count", [1, 1000])
def test_every_piece_is_submitted_once_and_in_order(count: int) -> None:
    engine = Engine()
    run(engine, flight("a", count, 1), window=64)
    assert engine.order == list(range(count))
