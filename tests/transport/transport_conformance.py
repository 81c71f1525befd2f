"""What every transport must do. A transport's tests inherit TransportConformance and say how its two sides are made."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transport_peer import Arena

from weight_sync.errors import BindError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Endpoint, Region, Transport

KB = 1 << 10
MB = 1 << 20
ARENA = 2 * MB
SPANS = [(16 * KB, MB), (MB + 256 * KB, 256 * KB)]
LIMIT = 20.0
PATIENCE = 120.0
"""Seconds for what must succeed: on an emulated machine 64 MiB take a good part of LIMIT."""


class Source:
    """A writing side: its transport, and an arena registered as a whole, filled with bytes that repeat nowhere nearby."""

    def __init__(self, transport: Transport, nbytes: int = ARENA) -> None:
        self.transport, self.arena = transport, Arena(nbytes)
        self.arena.data[:] = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        transport.register([Region(self.arena.base, nbytes)])

    def batch(self, peer: Any, writes: list[tuple[int, int, int]], endpoint: Endpoint | None = None) -> Batch:
        """writes: (offset here, offset there, bytes)."""
        table = np.array(writes, np.int64).reshape(-1, 3)
        return Batch(
            endpoint=peer.endpoint if endpoint is None else endpoint,
            local=self.arena.base + table[:, 0],
            remote=peer.base + table[:, 1],
            nbytes=table[:, 2].copy(),
            tensors=[f"tensor{i}" for i in range(len(table))],
        )

    def send(self, peer: Any, writes: list[tuple[int, int, int]], seconds: float = PATIENCE) -> int:
        ticket = self.transport.write(self.batch(peer, writes))
        return self.transport.wait(ticket, Deadline.after(seconds)).nbytes

    def fetch(self, peer: Any, reads: list[tuple[int, int, int]], seconds: float = PATIENCE) -> int:
        ticket = self.transport.read(self.batch(peer, reads))
        return self.transport.wait(ticket, Deadline.after(seconds)).nbytes

    def expect(self, peer: Any, writes: list[tuple[int, int, int]]) -> str:
        """Digest of the peer's arena, had it been all CANARY before."""
        model = Arena(peer.nbytes)
        for here, there, nbytes in writes:
            model.data[there : there + nbytes] = self.arena.data[here : here + nbytes]
        return model.digest()


class TransportConformance:
    """Subclasses define `make_transport` (a fixture giving a factory) and `make_peer` (class-scoped, likewise)."""

    stopped_peer_can_be_written_to = False

    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def shared_peer(cls, make_peer: Callable[..., Any]) -> Any:
        return make_peer(ARENA, SPANS)

    @pytest.fixture
    def peer(self, shared_peer: Any) -> Any:
        """A peer that survives the test; its arena is all CANARY."""
        shared_peer.fill(0xC5)
        return shared_peer

    @pytest.fixture
    def source(self, make_transport: Callable[[], Transport], peer: Any) -> Iterator[Source]:
        side = Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        yield side
        side.transport.close()

    # --- bytes

    def test_bytes_land_exactly_where_they_were_sent_and_nowhere_else(self, source: Source, peer: Any) -> None:
        writes = [(5, 16 * KB, 1000), (100_000, 16 * KB + MB - 77, 77), (9, MB + 256 * KB, 256 * KB), (3, 50_001, 1)]
        before = source.arena.digest()
        assert source.send(peer, writes) == sum(n for *_, n in writes)
        assert peer.digest() == source.expect(peer, writes)
        assert source.arena.digest() == before, "a transport never writes into its source"

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_strided_pieces_in_any_order_equal_a_plain_copy(self, source: Source, peer: Any, data: st.DataObject) -> None:
        peer.fill(0xC5)
        width = data.draw(st.integers(1, 700), "bytes of a piece")
        stride = data.draw(st.integers(width, width + 300), "bytes between pieces there")
        count = data.draw(st.integers(1, min(900, MB // stride)), "pieces")
        start = data.draw(st.integers(0, MB - stride * count), "offset in the region")
        here = data.draw(st.integers(0, ARENA - width * count), "offset here")
        order = data.draw(st.randoms(use_true_random=False), "order").sample(range(count), count)
        writes = [(here + i * width, 16 * KB + start + i * stride, width) for i in order]
        source.send(peer, writes)
        assert peer.digest() == source.expect(peer, writes)

    def test_more_than_five_thousand_writes_in_one_batch_all_land(self, source: Source, peer: Any) -> None:
        writes = [(i * 150, 16 * KB + i * 170, 150) for i in range(6000)]
        assert source.send(peer, writes) == 900_000
        assert peer.digest() == source.expect(peer, writes)

    def test_several_batches_in_flight_are_told_apart(self, source: Source, peer: Any) -> None:
        parts = [[(k * 10_000, 16 * KB + k * 20_000, 10_000 + k)] for k in range(20)]
        tickets = [source.transport.write(source.batch(peer, part)) for part in parts]
        done = [source.transport.wait(ticket, Deadline.after(LIMIT)).nbytes for ticket in reversed(tickets)]
        assert done == [10_000 + k for k in reversed(range(20))]
        assert peer.digest() == source.expect(peer, [write for part in parts for write in part])

    # --- reads

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_reads_bring_the_peers_bytes_and_change_nothing_else_on_either_side(
        self, source: Source, peer: Any, data: st.DataObject
    ) -> None:
        peer.fill(0xC5)
        source.arena.data[:] = np.random.default_rng(1).integers(0, 256, ARENA, dtype=np.uint8)
        source.send(peer, [(0, 16 * KB, MB)])
        theirs, mine = peer.digest(), source.arena.data.copy()
        width = data.draw(st.integers(1, 900), "bytes of a piece")
        count = data.draw(st.integers(1, min(1200, MB // width)), "pieces")
        gap = data.draw(st.integers(0, (ARENA - MB - width * count) // count), "bytes between pieces here")
        order = data.draw(st.randoms(use_true_random=False), "order").sample(range(count), count)
        source.arena.data[MB:] = 0
        expected = source.arena.data.copy()
        reads = [(MB + i * (width + gap), 16 * KB + i * width, width) for i in order]
        for here, there, nbytes in reads:
            expected[here : here + nbytes] = mine[there - 16 * KB : there - 16 * KB + nbytes]
        assert source.fetch(peer, reads) == width * count
        assert np.array_equal(source.arena.data, expected)
        assert peer.digest() == theirs, "a read changes nothing at the peer"

    def test_reads_and_writes_in_flight_together_are_told_apart(self, source: Source, peer: Any) -> None:
        source.send(peer, [(0, 16 * KB, 256 * KB)])
        source.arena.data[MB:] = 0
        writes = [[(k * 5000, MB + 256 * KB + k * 5000, 5000)] for k in range(10)]
        reads = [[(MB + k * 20_000, 16 * KB + k * 20_000, 20_000)] for k in range(10)]
        batches = [(source.transport.write, one) for one in writes] + [(source.transport.read, one) for one in reads]
        tickets = [call(source.batch(peer, one)) for pair in zip(batches[:10], batches[10:], strict=True) for call, one in pair]
        done = [source.transport.wait(ticket, Deadline.after(LIMIT)).nbytes for ticket in tickets]
        assert done == [5000, 20_000] * 10
        assert np.array_equal(source.arena.data[MB : MB + 200_000], source.arena.data[:200_000])
        assert not source.arena.data[MB + 200_000 :].any()
        assert peer.digest() == source.expect(peer, [(0, 16 * KB, 256 * KB), *(one for part in writes for one in part)])

    def test_a_read_into_memory_that_is_not_registered_here_is_refused(
        self, make_transport: Callable[[], Transport], peer: Any
    ) -> None:
        transport, arena = make_transport(), Arena(ARENA)
        transport.register([Region(arena.base, MB)])
        transport.probe(peer.endpoint, Deadline.after(LIMIT))
        local = np.array([arena.base, arena.base + MB - 1], np.int64)
        remote = np.array([peer.base + 16 * KB, peer.base + 20 * KB], np.int64)
        peer.fill(0x11)
        with pytest.raises(TransportError) as caught:
            transport.read(Batch(peer.endpoint, local, remote, np.array([10, 2], np.int64), ["good", "model.norm.weight"]))
        assert (caught.value.code, caught.value.tensor) == ("unregistered local", "model.norm.weight")
        transport.close()
        assert arena.digest() == Arena(ARENA).digest()

    @pytest.mark.parametrize(("there", "nbytes"), [(0, 100), (16 * KB + MB - 1, 2)])
    def test_a_read_of_memory_that_the_peer_did_not_register_is_an_error(
        self, source: Source, peer: Any, there: int, nbytes: int
    ) -> None:
        peer.fill(0x11)
        before = source.arena.digest()
        with pytest.raises(TransportError) as caught:
            source.fetch(peer, [(MB, there, nbytes)])
        assert (caught.value.code, caught.value.tensor) == ("unregistered remote", "tensor0")
        assert caught.value.byte_range == (peer.base + there, peer.base + there + nbytes)
        assert source.arena.digest() == before

    def test_a_peer_that_was_never_probed_or_is_of_another_epoch_is_not_read_from(
        self, make_transport: Callable[[], Transport], peer: Any
    ) -> None:
        side = Source(make_transport())
        before = side.arena.digest()
        stale = dataclasses.replace(peer.endpoint, epoch=peer.endpoint.epoch + 1)
        with pytest.raises(TransportError, match="stale endpoint"):
            side.transport.probe(stale, Deadline.after(LIMIT))
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        with pytest.raises(TransportError) as caught:
            side.transport.read(side.batch(peer, [(0, 16 * KB, 8)], endpoint=stale))
        assert caught.value.code == "not probed"
        assert side.arena.digest() == before
        side.transport.close()

    def test_a_peer_that_dies_or_closes_before_it_is_read_is_one_error_and_poisons_the_reader(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(64 * MB, [(0, 64 * MB)])
        side = Source(make_transport(), 64 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.fetch(peer, [(0, 0, MB)]) == MB
        assert set(side.arena.data[:MB]) == {0xC5}
        peer.kill()
        started = time.monotonic()
        with pytest.raises(TransportError) as caught:
            side.fetch(peer, [(0, 0, 64 * MB)], LIMIT)
        assert time.monotonic() - started < LIMIT + 5
        assert caught.value.tensor in {"tensor0", "(none)"}
        assert peer.endpoint.address in caught.value.endpoint
        if caught.value.tensor != "(none)":
            self.assert_poisoned(side, peer)
        side.transport.close()

    def test_a_read_of_a_stopped_peer_costs_the_deadline_and_nothing_arrives_after_the_fence(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(64 * MB, [(0, 64 * MB)])
        if not hasattr(peer, "stop"):
            pytest.skip("a peer in this process cannot be stopped")
        side = Source(make_transport(), 64 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        peer.stop()
        # Where nobody answers it must not be over within a second. A soft device under emulation gives up on that much.
        nbytes = (8 if self.stopped_peer_can_be_written_to else 64) * MB
        ticket = side.transport.read(side.batch(peer, [(0, 0, nbytes)]))
        if self.stopped_peer_can_be_written_to:
            assert side.transport.wait(ticket, Deadline.after(PATIENCE)).nbytes == nbytes
            assert set(side.arena.data[: nbytes : 64 * KB]) == {0xC5}
            side.transport.close()
            return
        started = time.monotonic()
        with pytest.raises(TransportError) as caught:
            side.transport.wait(ticket, Deadline.after(1.0))
        assert 0.9 < time.monotonic() - started < 3.0
        assert caught.value.code == "deadline"
        self.assert_poisoned(side, peer)
        side.transport.close()
        side.arena.data[:] = 0x5A  # the fence is up: this memory is ours again
        peer.go_on()
        time.sleep(0.5)
        assert set(np.unique(side.arena.data)) == {0x5A}
        peer.end()

    # --- refusals: nothing is sent and the transport stays usable

    def refused(self, source: Source, peer: Any, writes: list[tuple[int, int, int]], code: str) -> TransportError:
        with pytest.raises(TransportError) as caught:
            source.send(peer, writes)
        assert caught.value.code == code
        return caught.value

    def test_a_source_outside_registered_memory_is_refused_and_nothing_arrives(
        self, make_transport: Callable[[], Transport], peer: Any
    ) -> None:
        transport = make_transport()
        arena = Arena(ARENA)
        transport.register([Region(arena.base, MB)])
        transport.probe(peer.endpoint, Deadline.after(LIMIT))
        for at in (MB, MB - 1):
            batch = Batch(
                peer.endpoint,
                np.array([arena.base, arena.base + at], np.int64),
                np.array([peer.base + 16 * KB, peer.base + 20 * KB], np.int64),
                np.array([10, 2], np.int64),
                ["good", "model.norm.weight"],
            )
            with pytest.raises(TransportError) as caught:
                transport.write(batch)
            assert (caught.value.code, caught.value.tensor) == ("unregistered local", "model.norm.weight")
        transport.close()
        assert peer.digest() == Arena(ARENA).digest()

    @pytest.mark.parametrize(
        ("there", "nbytes"),
        [(0, 100), (16 * KB - 1, 2), (16 * KB + MB - 1, 2), (MB + 100 * KB, 10), (MB + 256 * KB, 256 * KB + 1)],
    )
    def test_a_destination_outside_the_peers_regions_is_an_error_and_changes_nothing_outside(
        self, source: Source, peer: Any, there: int, nbytes: int
    ) -> None:
        good = (0, 16 * KB, 64)
        error = self.refused(source, peer, [good, (0, there, nbytes)], "unregistered remote")
        assert error.tensor == "tensor1"
        assert error.byte_range == (peer.base + there, peer.base + there + nbytes)
        assert peer.digest() in {source.expect(peer, []), source.expect(peer, [good])}

    def test_a_peer_that_was_never_probed_is_not_written_to(self, make_transport: Callable[[], Transport], peer: Any) -> None:
        side = Source(make_transport())
        self.refused(side, peer, [(0, 16 * KB, 8)], "not probed")
        side.transport.close()
        assert peer.digest() == Arena(ARENA).digest()

    def test_an_endpoint_of_another_epoch_is_stale(self, source: Source, peer: Any) -> None:
        stale = dataclasses.replace(peer.endpoint, epoch=peer.endpoint.epoch + 1)
        with pytest.raises(TransportError, match="stale endpoint") as caught:
            source.transport.probe(stale, Deadline.after(LIMIT))
        assert caught.value.code == "stale epoch"
        assert source.send(peer, [(0, 16 * KB, 8)]) == 8

    def test_an_endpoint_of_another_protocol_is_refused(self, source: Source, peer: Any) -> None:
        for other in ({"protocol": "pigeon"}, {"transport": "pigeon"}):
            with pytest.raises(TransportError) as caught:
                source.transport.probe(dataclasses.replace(peer.endpoint, **other), Deadline.after(LIMIT))
            assert caught.value.code == "protocol"

    def test_a_passed_deadline_is_an_error_before_anything_is_sent(self, source: Source, peer: Any) -> None:
        with pytest.raises(TransportError) as caught:
            source.transport.probe(peer.endpoint, Deadline.after(0.0))
        assert caught.value.code == "deadline"

    def test_an_empty_write_and_an_empty_batch_are_refused(self, source: Source, peer: Any) -> None:
        with pytest.raises(ValueError, match="0 bytes"):
            source.send(peer, [(0, 16 * KB, 8), (0, 20 * KB, 0)])
        with pytest.raises(ValueError, match="at least one"):
            source.send(peer, [])

    def test_every_ticket_is_waited_for_once(self, source: Source, peer: Any) -> None:
        ticket = source.transport.write(source.batch(peer, [(0, 16 * KB, 8)]))
        source.transport.wait(ticket, Deadline.after(LIMIT))
        with pytest.raises(ValueError, match="waited for once"):
            source.transport.wait(ticket, Deadline.after(LIMIT))

    # --- registration and description

    def test_a_storage_is_registered_once_and_overlaps_are_refused(self, make_transport: Callable[[], Transport]) -> None:
        transport = make_transport()
        arena = Arena(MB)
        transport.register(arena.regions([(0, 4 * KB), (8 * KB, 4 * KB)]))
        transport.register(arena.regions([(4 * KB, 4 * KB)]))
        for spans in ([(0, 4 * KB)], [(11 * KB, 4 * KB)], [(20 * KB, 0)], [(30 * KB, 2 * KB), (31 * KB, 2 * KB)]):
            with pytest.raises(BindError):
                transport.register(arena.regions(spans))
        with pytest.raises(BindError, match="register storages, not single tensors"):
            transport.register(arena.regions([(16 * KB + i * 64, 32) for i in range(5000)]))
        transport.close()

    def test_a_description_is_plain_data_and_comes_back_equal(self, make_transport: Callable[[], Transport]) -> None:
        transport, other = make_transport(), make_transport()
        endpoint = transport.describe()
        assert Endpoint.from_json(json.loads(json.dumps(endpoint.to_json()))) == endpoint
        assert endpoint == transport.describe()
        assert endpoint.epoch != other.describe().epoch
        assert endpoint.transport == transport.name
        transport.close()
        other.close()

    # --- peers that go away

    def test_an_address_where_nobody_is_cannot_be_probed(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        gone = make_peer(ARENA, SPANS)
        gone.kill()
        side = Source(make_transport())
        with pytest.raises(TransportError) as caught:
            side.transport.probe(gone.endpoint, Deadline.after(LIMIT))
        assert gone.endpoint.address in str(caught.value)
        self.refused(side, gone, [(0, 16 * KB, 8)], "not probed")
        side.transport.close()

    def test_a_closed_peer_is_neither_probed_nor_written_to(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(ARENA, SPANS)
        side, late = Source(make_transport()), Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.send(peer, [(0, 16 * KB, 8)]) == 8
        after = side.expect(peer, [(0, 16 * KB, 8)])
        peer.close()
        with pytest.raises(TransportError):
            side.send(peer, [(64, 16 * KB, 8)], LIMIT)
        with pytest.raises(TransportError):
            late.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert peer.digest() == after
        peer.end()
        side.transport.close()
        late.transport.close()

    def test_a_peer_that_dies_halfway_is_one_error_and_poisons_the_transport(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(64 * MB, [(0, 64 * MB)])
        side = Source(make_transport(), 64 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.send(peer, [(0, 0, MB)]) == MB
        tickets = [side.transport.write(side.batch(peer, [(0, 0, 64 * MB)])) for _ in range(8)]
        peer.kill()
        started = time.monotonic()

        def wait_for_all() -> None:
            for ticket in tickets:
                side.transport.wait(ticket, Deadline.after(LIMIT))

        with pytest.raises(TransportError) as caught:
            wait_for_all()
        assert time.monotonic() - started < LIMIT + 5
        # Either this write failed, or the peer as a whole was found gone before it.
        assert caught.value.tensor in {"tensor0", "(none)"}
        assert peer.endpoint.address in caught.value.endpoint
        self.assert_poisoned(side, peer)
        side.transport.close()

    def test_a_stopped_peer_costs_no_more_than_the_deadline(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(64 * MB, [(0, 64 * MB)])
        if not hasattr(peer, "stop"):
            pytest.skip("a peer in this process cannot be stopped")
        side = Source(make_transport(), 64 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        peer.stop()
        ticket = side.transport.write(side.batch(peer, [(0, 0, 64 * MB)]))
        if self.stopped_peer_can_be_written_to:
            assert side.transport.wait(ticket, Deadline.after(PATIENCE)).nbytes == 64 * MB
            peer.go_on()
            assert peer.digest() == side.expect(peer, [(0, 0, 64 * MB)])
            side.transport.close()
            return
        started = time.monotonic()
        with pytest.raises(TransportError) as caught:
            side.transport.wait(ticket, Deadline.after(1.0))
        assert 0.9 < time.monotonic() - started < 3.0
        assert caught.value.code == "deadline"
        self.assert_poisoned(side, peer)
        # The fence: once close() has returned, what the source holds from now on can no longer arrive.
        side.transport.close()
        honest = int((side.arena.data == 0x5A).sum())
        side.arena.data[:] = 0x5A
        peer.go_on()
        time.sleep(0.5)
        assert peer.count(0x5A) <= honest
        peer.end()

    def assert_poisoned(self, side: Source, peer: Any) -> None:
        calls: list[Callable[[], Any]] = [
            side.transport.describe,
            lambda: side.transport.register([Region(side.arena.base, 1)]),
            lambda: side.transport.probe(peer.endpoint, Deadline.after(LIMIT)),
            lambda: side.transport.write(side.batch(peer, [(0, 16 * KB, 8)])),
            lambda: side.transport.read(side.batch(peer, [(0, 16 * KB, 8)])),
        ]
        for call in calls:
            with pytest.raises(TransportError) as caught:
                call()
            assert caught.value.code == "poisoned"

    # --- the end

    def test_a_closed_transport_refuses_every_call(self, make_transport: Callable[[], Transport], peer: Any) -> None:
        transport = make_transport()
        side = Source(transport)
        transport.close()
        for call in (transport.describe, transport.close, lambda: transport.register([Region(side.arena.base, 1)])):
            with pytest.raises(TransportError) as caught:
                call()
            assert caught.value.code == "closed"

    def test_a_forked_child_may_not_use_its_parents_transport(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        if source.transport.name == "memory":
            pytest.skip("the memory transport ends with its process anyway")
        parent = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(TransportError, match="fork"):
                source.transport.describe()
