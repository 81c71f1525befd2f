"""The in-process transport: the common suite, landing in any order, and every fault it can inject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source, TransportConformance
from transport_peer import Arena, LocalPeer

from weight_sync.errors import BindError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Transport
from weight_sync.transport.faults import Fault, FaultKind, RandomFaults, ScriptedFaults
from weight_sync.transport.memory import MemoryHub, MemoryTransport


class TestMemory(TransportConformance):
    landing_seed: int | None = None

    @pytest.fixture(scope="class")
    @classmethod
    def hub(cls) -> MemoryHub:
        return MemoryHub()

    @pytest.fixture
    def make_transport(self, hub: MemoryHub) -> Callable[[], Transport]:
        return lambda: MemoryTransport(hub, landing_seed=self.landing_seed)

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls, hub: MemoryHub) -> Callable[..., Any]:
        return lambda nbytes, spans: LocalPeer(MemoryTransport(hub), nbytes, spans)


class TestMemoryWithRandomLanding(TestMemory):
    landing_seed = 7


class Pair:
    def __init__(self, seed: int | None = None, **faults: Fault) -> None:
        self.hub = MemoryHub()
        self.peer = LocalPeer(MemoryTransport(self.hub, address="worker"), ARENA, SPANS)
        script = ScriptedFaults({int(key[1:]): fault for key, fault in faults.items()})
        self.source = Source(MemoryTransport(self.hub, landing_seed=seed, faults=script))
        self.source.transport.probe(self.peer.endpoint, Deadline.after(LIMIT))


WRITE = (0, 16 * KB, 4096)


def landed(pair: Pair) -> bool:
    return pair.peer.digest() == pair.source.expect(pair.peer, [WRITE])


def untouched(pair: Pair) -> bool:
    return pair.peer.digest() == Arena(ARENA).digest()


def test_a_restarted_peer_at_the_same_address_is_another_epoch() -> None:
    pair = Pair()
    old = pair.peer.endpoint
    with pytest.raises(BindError, match="in use"):
        MemoryTransport(pair.hub, address="worker")
    pair.peer.close()
    again = LocalPeer(MemoryTransport(pair.hub, address="worker"), ARENA, SPANS)
    assert again.endpoint.address == old.address
    with pytest.raises(TransportError) as caught:
        pair.source.send(pair.peer, [WRITE])
    assert caught.value.code == "stale epoch"
    assert again.digest() == Arena(ARENA).digest()


def test_hubs_do_not_see_each_others_peers() -> None:
    one, other = Pair(), Pair()
    one.peer.close()
    with pytest.raises(TransportError) as caught:
        one.source.transport.probe(other.peer.endpoint, Deadline.after(LIMIT))
    assert caught.value.code in {"unknown peer", "stale epoch"}


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_source_changed_before_wait_is_what_arrives_at_least_in_part(seed: int | None) -> None:
    pair = Pair(seed)
    pair.peer.fill(0)
    pair.source.arena.data[:] = 1
    writes = [(i * 4096, 16 * KB + i * 4096, 4096) for i in range(64)]
    ticket = pair.source.transport.write(pair.source.batch(pair.peer, writes))
    pair.source.arena.data[:] = 2
    pair.source.transport.wait(ticket, Deadline.after(LIMIT))
    changed = pair.peer.count(2)
    assert changed == (64 * 4096 if seed is None else changed) > 0
    assert pair.peer.count(1) + changed == 64 * 4096


def test_random_landing_is_a_function_of_its_seed() -> None:
    def early(seed: int) -> int:
        pair = Pair(seed)
        pair.peer.fill(0)
        pair.source.arena.data[:] = 1
        pair.source.transport.write(pair.source.batch(pair.peer, [(0, 16 * KB + i * 64, 64) for i in range(99)]))
        return pair.peer.count(1)

    assert early(3) == early(3)
    assert 0 < early(3) < 99 * 64


def test_drop_reports_success_and_writes_nothing() -> None:
    pair = Pair(w0=Fault(FaultKind.DROP))
    assert pair.source.send(pair.peer, [WRITE]) == 4096
    assert untouched(pair)


def test_corrupt_reports_success_and_flips_one_byte() -> None:
    pair = Pair(w0=Fault(FaultKind.CORRUPT))
    pair.source.arena.data[:] = 0
    pair.source.send(pair.peer, [WRITE])
    assert (pair.peer.count(0), pair.peer.count(0xFF)) == (4095, 1)


def test_truncate_reports_success_and_writes_the_first_half() -> None:
    pair = Pair(w0=Fault(FaultKind.TRUNCATE))
    pair.source.send(pair.peer, [WRITE])
    assert pair.peer.digest() == pair.source.expect(pair.peer, [(0, 16 * KB, 2048)])


def test_a_duplicate_lands_again_later_from_what_the_source_holds_then() -> None:
    pair = Pair(w0=Fault(FaultKind.DUPLICATE))
    pair.source.send(pair.peer, [WRITE])
    assert landed(pair)
    pair.source.arena.data[:] = 0
    pair.source.send(pair.peer, [(8, MB + 256 * KB, 1)])
    assert pair.peer.count(0) == 4097


def test_a_duplicate_cannot_outlive_the_fence() -> None:
    pair = Pair(w0=Fault(FaultKind.DUPLICATE))
    pair.source.send(pair.peer, [WRITE])
    before = pair.peer.digest()
    pair.source.arena.data[:] = 0
    pair.source.transport.close()
    assert pair.peer.digest() == before


def test_a_delay_within_the_deadline_is_only_slow() -> None:
    pair = Pair(w0=Fault(FaultKind.DELAY, seconds=0.05))
    ticket = pair.source.transport.write(pair.source.batch(pair.peer, [WRITE]))
    assert pair.source.transport.wait(ticket, Deadline.after(LIMIT)).seconds >= 0.05
    assert landed(pair)


def test_a_delay_past_the_deadline_is_an_error_and_the_bytes_land_afterwards() -> None:
    pair = Pair(w0=Fault(FaultKind.DELAY, seconds=30.0))
    with pytest.raises(TransportError) as caught:
        pair.source.send(pair.peer, [WRITE], seconds=0.05)
    assert caught.value.code == "deadline"
    assert untouched(pair)
    pair.source.arena.data[:] = 0
    pair.source.transport.settle()
    assert pair.peer.count(0) == 4096


def test_what_a_passed_deadline_left_on_the_wire_lands_afterwards() -> None:
    pair = Pair()
    with pytest.raises(TransportError) as caught:
        pair.source.send(pair.peer, [WRITE], seconds=0.0)
    assert (caught.value.code, caught.value.tensor) == ("deadline", "tensor0")
    assert untouched(pair)
    pair.source.transport.settle()
    assert landed(pair)


def test_an_error_names_its_tensor_and_code_while_the_rest_of_the_batch_lands() -> None:
    pair = Pair(w1=Fault(FaultKind.ERROR, code=-1))
    writes = [WRITE, (0, 100 * KB, 50), (0, 200 * KB, 60)]
    with pytest.raises(TransportError) as caught:
        pair.source.send(pair.peer, writes)
    assert (caught.value.tensor, caught.value.code) == ("tensor1", -1)
    assert pair.peer.digest() == pair.source.expect(pair.peer, [writes[0], writes[2]])
    with pytest.raises(TransportError, match="poisoned"):
        pair.source.transport.describe()


def test_faults_count_writes_over_all_batches() -> None:
    pair = Pair(w2=Fault(FaultKind.DROP))
    pair.source.send(pair.peer, [WRITE, (0, 100 * KB, 50)])
    pair.source.send(pair.peer, [(0, 200 * KB, 60), (0, 300 * KB, 70)])
    assert pair.peer.digest() == pair.source.expect(pair.peer, [WRITE, (0, 100 * KB, 50), (0, 300 * KB, 70)])


def test_random_faults_depend_on_seed_and_write_number_only() -> None:
    plan = RandomFaults(seed=5, rate=0.3)
    first = [plan.fault(i) for i in range(400)]
    assert first == [plan.fault(i) for i in range(400)]
    assert 60 < sum(fault is not None for fault in first) < 180
    assert {fault.kind for fault in first if fault is not None} == set(FaultKind)
    assert first != [RandomFaults(seed=6, rate=0.3).fault(i) for i in range(400)]
