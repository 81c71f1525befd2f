"""NIXL over UCX's tcp, against a real second process; over verbs: tests/rdma/inside/test_rdma_nixl.py."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source, TransportConformance
from transport_peer import Arena, LocalPeer, ProcessPeer, ends_by_itself

from weight_sync.errors import BindError, ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import nixl, preflight, registry
from weight_sync.transport.base import Batch, Region, Transport
from weight_sync.transport.nixl import NixlTransport
from weight_sync.transport.nixl_agent import unreadable

TCP = {"protocol": "tcp", "devices": "lo", "host": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _environment_steers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in preflight.UCX_VARIABLES:
        monkeypatch.delenv(name, raising=False)


class TestNixlTcp(TransportConformance):
    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        return lambda: NixlTransport(**TCP)

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        peers: list[ProcessPeer] = []

        def make(nbytes: int, spans: list[tuple[int, int]]) -> ProcessPeer:
            peers.append(ProcessPeer("nixl", TCP, nbytes, spans))
            return peers[-1]

        yield make
        for peer in peers:
            peer.end()

    def test_a_batch_is_prepared_once_and_posted_again_and_twice_at_once(
        self, source: Source, peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        agent, prepared = source.transport._agent, []
        original = agent.prepare
        monkeypatch.setattr(agent, "prepare", lambda *words, **more: prepared.append(1) or original(*words, **more))
        writes = [(i * 150, 16 * KB + i * 170, 150) for i in range(nixl.PART_RANGES + 1)]
        batch = source.batch(peer, writes)
        for _ in range(3):
            source.arena.data[:] += 1
            source.transport.wait(source.transport.write(batch), Deadline.after(LIMIT))
            assert peer.digest() == source.expect(peer, writes)
        assert len(prepared) == 2, "two transfers, for there are more ranges than one takes"
        source.arena.data[:] += 1
        tickets = [source.transport.write(batch) for _ in range(2)]
        for ticket in tickets:
            source.transport.wait(ticket, Deadline.after(LIMIT))
        assert peer.digest() == source.expect(peer, writes)
        del tickets, ticket, batch
        gc.collect()
        assert len(source.transport._idle) == 4, "given back by the next write"
        source.send(peer, writes[:1])
        assert len(source.transport._idle) <= 1

    def test_ranges_larger_than_one_transfer_arrive_whole(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nixl, "PART_BYTES", 100_001)
        peer, side = make_peer(8 * MB, [(0, 8 * MB)]), Source(make_transport(), 8 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        writes = [(0, 0, 3 * MB + 1), (3 * MB + 1, 4 * MB, 1), (5 * MB, 5 * MB, 2 * MB)]
        assert side.send(peer, writes) == 5 * MB + 2
        assert peer.digest() == side.expect(peer, writes)
        side.transport.close()

    def test_what_the_peer_did_not_publish_is_refused_by_nixl_too_and_nothing_is_sent(
        self, source: Source, peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as unchecked:
            unchecked.setattr(nixl, "check_remote", lambda *_: None)
            with pytest.raises(TransportError, match="nothing was sent: NIXL_ERR"):
                source.send(peer, [(0, 0, 64)])
        assert source.send(peer, [(0, 16 * KB, 64)]) == 64, "the transport is usable after that"

    def test_regions_that_a_peer_registers_later_are_known_after_the_next_probe(
        self, make_transport: Callable[[], Transport]
    ) -> None:
        late, arena = make_transport(), Arena(ARENA)
        side = Source(make_transport())
        with pytest.raises(TransportError, match="registered no memory"):
            side.transport.probe(late.describe(), Deadline.after(LIMIT))
        peer = LocalPeer(late, ARENA, [(0, 4 * KB)])
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        late.register([Region(arena.base, ARENA)])
        batch = Batch(peer.endpoint, *(np.array([n]) for n in (side.arena.base, arena.base, 100)), ["w"])
        with pytest.raises(TransportError, match="had registered when probed"):
            side.transport.write(batch)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        side.transport.wait(side.transport.write(batch), Deadline.after(LIMIT))
        assert np.array_equal(arena.data[:100], side.arena.data[:100])
        side.transport.close()
        late.close()

    def test_a_peer_that_was_replaced_is_refused_at_its_old_endpoint_and_reached_at_its_new_one(
        self, make_transport: Callable[[], Transport]
    ) -> None:
        side, peer = Source(make_transport()), LocalPeer(make_transport(), ARENA, SPANS)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        peer.close()
        again = make_transport()
        again.register(peer.arena.regions(SPANS))
        with pytest.raises(TransportError):
            side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert peer.count(0xC5) == ARENA
        fresh = Source(make_transport())
        fresh.transport.probe(again.describe(), Deadline.after(LIMIT))
        batch = fresh.batch(peer, [(0, 16 * KB, 100)], endpoint=again.describe())
        fresh.transport.wait(fresh.transport.write(batch), Deadline.after(LIMIT))
        assert np.array_equal(peer.arena.data[16 * KB : 16 * KB + 100], fresh.arena.data[:100])
        for transport in (side.transport, fresh.transport, again):
            transport.close()

    @pytest.mark.parametrize("connection", ["", "bm8gbWV0YWRhdGE=", "not base64!"])
    def test_an_endpoint_with_other_peoples_metadata_or_none_is_refused(
        self, source: Source, peer: Any, connection: str
    ) -> None:
        for wrong in ({"connection": connection}, {"address": "127.0.0.1:1:2"}):
            with pytest.raises(TransportError) as caught:
                source.transport.probe(dataclasses.replace(peer.endpoint, **wrong), Deadline.after(LIMIT))
            assert caught.value.code in ("address", "NIXL_ERR_MISMATCH", "NIXL_ERR_INVALID_PARAM")
        assert source.send(peer, [(0, 16 * KB, 8)]) == 8

    def test_a_peer_that_is_stopped_before_the_probe_costs_the_deadline_and_poisons_nothing(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any], peer: Any
    ) -> None:
        stopped, side = make_peer(ARENA, SPANS), Source(make_transport())
        stopped.stop()
        started = time.monotonic()
        with pytest.raises(TransportError) as caught:
            side.transport.probe(stopped.endpoint, Deadline.after(0.5))
        assert (caught.value.code, time.monotonic() - started < 3.0) == ("deadline", True)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.send(peer, [(0, 16 * KB, 8)]) == 8
        side.transport.close()

    def test_an_agent_that_waits_for_work_costs_next_to_nothing(self, source: Source, peer: Any) -> None:
        """NIXL's own Python class keeps a core busy for each."""
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25


def test_the_words_that_steer_ucx_are_refused_and_the_environment_is_as_it_was_after(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    NixlTransport(**TCP).close()
    assert dict(os.environ) == before
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with pytest.raises(ConfigError, match=r"the environment sets UCX_NET_DEVICES=eth7.*UCX_TLS=tcp,self, UCX_NET_DEVICES=lo"):
        NixlTransport(**TCP)
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(ConfigError, match="p2p_nixl cannot work on this machine: UCX_TLS=all is set"):
        NixlTransport(**TCP)


def test_transports_opened_by_several_threads_at_once_do_not_see_each_others_words_to_ucx() -> None:
    with ThreadPoolExecutor(4) as pool:
        for transport in pool.map(lambda _: NixlTransport(**TCP), range(8)):
            transport.close()


def test_an_interface_that_is_not_there_and_an_unknown_protocol_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices names mlx5_7; network interfaces here: .*lo"):
        NixlTransport(protocol="tcp", devices="lo, mlx5_7")
    with pytest.raises(ConfigError, match=r"'shm' is not one of tcp, rdma; .*p2p_cma"):
        NixlTransport(protocol="shm")


def test_asking_for_rdma_without_a_device_is_refused_with_what_was_looked_for() -> None:
    if preflight.facts(gpus=False).rdma_ports:
        pytest.skip("this machine has an RDMA device")
    with pytest.raises(ConfigError) as caught:
        registry.create("nixl", protocol="rdma")
    assert "no RDMA device in /sys/class/infiniband" in str(caught.value)
    assert "p2p_nixl" in str(caught.value).partition("would work here")[2]


def test_memory_that_this_process_cannot_read_is_refused_by_address_and_nothing_is_registered() -> None:
    """GPU memory has addresses that are mapped for no access, or not at all."""
    transport, arena = NixlTransport(**TCP), Arena(ARENA)
    with mmap.mmap(-1, ARENA, prot=0) as closed:
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena._memory))
        assert unreadable([(address, ARENA)]) is None
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        hidden = next(int(span.split("-")[0], 16) for span, rights, *_ in rows if rights.startswith("---"))
        with pytest.raises(BindError, match=rf"\[{hidden:#x}, .*is not host memory of this process.*p2p_rdma"):
            transport.register([Region(arena.base, ARENA), Region(hidden, 4096)])
        assert len(closed) == ARENA
    transport.register([Region(arena.base, ARENA)])
    transport.close()


def test_mappings_side_by_side_count_as_one_and_gaps_do_not() -> None:
    maps = {0x1000: 0x2000, 0x2000: 0x4000, 0x5000: 0x6000}
    assert unreadable([(0x1000, 0x3000), (0x5000, 0x1000), (0x1FFF, 2)], maps) is None
    assert unreadable([(0x1000, 16), (0x3FFF, 2)], maps) == (0x3FFF, 2)
    assert unreadable([(0x800, 16)], maps) == (0x800, 16)


@pytest.mark.parametrize("writes", [0, 3])
def test_a_program_that_forgets_to_close_ends_by_itself_and_cleanly(writes: int) -> None:
    ends_by_itself("nixl", TCP, writes)


def test_importing_the_transport_does_not_import_nixl() -> None:
    program = "import sys, weight_sync.transport.nixl; sys.exit(any(m.startswith('nixl') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
