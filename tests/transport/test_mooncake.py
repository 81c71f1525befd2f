"""Mooncake over real tcp, against a real second process; and the ways in which it must not be believed."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source, TransportConformance
from transport_peer import LocalPeer, ProcessPeer, ends_by_itself

from weight_sync.errors import ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import preflight, rdma, registry
from weight_sync.transport.base import Transport
from weight_sync.transport.mooncake import MooncakeTransport
from weight_sync.transport.mooncake_engine import STEERING, buffers_of, protocol_of, published, start_engine
from weight_sync.transport.mooncake_pump import TUNING, Tuning

TCP = {"protocol": "tcp", "host": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _environment_steers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)


class TestMooncakeTcp(TransportConformance):
    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        return lambda: MooncakeTransport(protocol="tcp", host="127.0.0.1")

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        peers: list[ProcessPeer] = []

        def make(nbytes: int, spans: list[tuple[int, int]]) -> ProcessPeer:
            peers.append(ProcessPeer("mooncake", TCP, nbytes, spans))
            return peers[-1]

        yield make
        for peer in peers:
            peer.end()

    def test_what_the_engine_publishes_is_what_was_registered_and_the_protocol_in_use(self, peer: Any) -> None:
        host, port = peer.endpoint.address.split(":")
        segment = published(host, int(port), Deadline.after(LIMIT))
        assert protocol_of(segment) == "tcp" == peer.endpoint.protocol
        spans = [(peer.base + offset, nbytes) for offset, nbytes in SPANS]
        assert sorted(buffers_of(segment)) == sorted([*spans, peer.endpoint.probe])

    def test_an_engine_opened_by_someone_else_is_probed_by_reading_only(self, source: Source, peer: Any) -> None:
        foreign = dataclasses.replace(peer.endpoint, probe=None)
        source.transport.probe(foreign, Deadline.after(LIMIT))
        assert peer.digest() == source.expect(peer, [])
        batch = source.batch(peer, [(0, 16 * KB, 100)], endpoint=foreign)
        source.transport.wait(source.transport.write(batch), Deadline.after(LIMIT))
        assert peer.digest() == source.expect(peer, [(0, 16 * KB, 100)])

    def test_a_probe_area_that_the_peer_does_not_know_is_a_stale_endpoint(self, source: Source, peer: Any) -> None:
        moved = dataclasses.replace(peer.endpoint, probe=(0x1000, 4096))
        with pytest.raises(TransportError) as caught:
            source.transport.probe(moved, Deadline.after(LIMIT))
        assert caught.value.code == "stale epoch"
        assert source.send(peer, [(0, 16 * KB, 8)]) == 8

    def test_a_peer_that_accepts_and_never_answers_costs_the_deadline_and_poisons_nothing(
        self, source: Source, peer: Any
    ) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(8)
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            started = time.monotonic()
            with pytest.raises(TransportError) as caught:
                source.transport.probe(dataclasses.replace(peer.endpoint, address=address), Deadline.after(0.5))
            assert time.monotonic() - started < 3.0
        assert caught.value.code == "deadline"
        assert source.send(peer, [(0, 16 * KB, 8)]) == 8

    @pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:80"])
    def test_a_peer_that_cannot_be_reached_is_named(self, source: Source, peer: Any, address: str) -> None:
        with pytest.raises(TransportError, match=address) as caught:
            source.transport.probe(dataclasses.replace(peer.endpoint, address=address), Deadline.after(LIMIT))
        assert caught.value.code == "unreachable"

    @pytest.mark.parametrize("address", ["", "host", "host:", "host:port", ":80", "host:70000"])
    def test_a_malformed_address_is_refused(self, source: Source, peer: Any, address: str) -> None:
        with pytest.raises(TransportError) as caught:
            source.transport.probe(dataclasses.replace(peer.endpoint, address=address), Deadline.after(LIMIT))
        assert caught.value.code == "address"

    def test_long_writes_are_cut_and_arrive_whole(self, make_peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        tuning = Tuning(piece=10_007, window=5, window_bytes=30_000, batched=False)
        peer = make_peer(ARENA, SPANS)
        side = Source(MooncakeTransport(protocol="tcp", host="127.0.0.1", tuning=tuning))
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        writes = [(7, 16 * KB, MB), (0, MB + 256 * KB, 1), (9, MB + 256 * KB + 1, 100_000)]
        assert side.send(peer, writes) == MB + 100_001
        assert peer.digest() == side.expect(peer, writes)
        side.transport.close()

    def test_the_batched_feed_used_for_device_copies_moves_the_same_bytes(self, make_peer: Callable[..., Any]) -> None:
        tuning = dataclasses.replace(TUNING["nvlink_intra"], window=100)
        peer = make_peer(ARENA, SPANS)
        side = Source(MooncakeTransport(protocol="tcp", host="127.0.0.1", tuning=tuning))
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        writes = [(i * 300, 16 * KB + i * 400, 300) for i in range(1050)]
        side.send(peer, writes)
        assert peer.digest() == side.expect(peer, writes)
        side.transport.close()

    def test_two_peers_are_written_to_at_once(self, source: Source, peer: Any, make_peer: Callable[..., Any]) -> None:
        other = make_peer(ARENA, SPANS)
        source.transport.probe(other.endpoint, Deadline.after(LIMIT))
        one, two = [(0, 16 * KB, MB)], [(i * 100, 16 * KB + i * 200, 100) for i in range(3000)]
        tickets = [source.transport.write(source.batch(p, w)) for p, w in ((peer, one), (other, two))]
        for ticket in tickets:
            source.transport.wait(ticket, Deadline.after(LIMIT))
        assert peer.digest() == source.expect(peer, one)
        assert other.digest() == source.expect(other, two)

    def test_a_dead_peer_fails_with_mooncakes_code_and_a_fresh_transport_works(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any], peer: Any
    ) -> None:
        dead = make_peer(ARENA, SPANS)
        side = Source(make_transport())
        side.transport.probe(dead.endpoint, Deadline.after(LIMIT))
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        dead.kill()
        with pytest.raises(TransportError) as caught:
            side.send(dead, [(0, 16 * KB, 8), (0, 20 * KB, 8)])
        assert caught.value.code in (-1, "not submitted", "deadline")
        self.assert_poisoned(side, peer)
        side.transport.close()
        fresh = Source(make_transport())
        fresh.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert fresh.send(peer, [(0, 16 * KB, 8)]) == 8
        fresh.transport.close()


def test_an_exception_from_the_engine_reaches_the_waiter_instead_of_looking_like_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, peer = (MooncakeTransport(protocol="tcp", host="127.0.0.1") for _ in range(2))
    there = LocalPeer(peer, ARENA, SPANS)
    side = Source(source)
    source.probe(there.endpoint, Deadline.after(LIMIT))
    monkeypatch.setattr(source._pump, "_advance", lambda flight: 1 // 0)
    with pytest.raises(TransportError, match="ZeroDivisionError"):
        side.send(there, [(0, 16 * KB, 8)])
    source.close()
    peer.close()


def test_close_deletes_the_engine_so_that_its_ports_no_longer_answer() -> None:
    transport = MooncakeTransport(protocol="tcp", host="127.0.0.1")
    address = transport.describe().address
    port = int(address.rpartition(":")[2])
    data_port = published("127.0.0.1", port, Deadline.after(LIMIT))["tcp_data_port"]
    transport.close()
    for closed in (port, data_port):
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", closed), timeout=5).close()


def test_engines_of_one_process_have_ports_of_their_own() -> None:
    transports = [MooncakeTransport(protocol="tcp", host="127.0.0.1") for _ in range(4)]
    addresses = [t.describe().address for t in transports]
    assert len(set(addresses)) == 4
    for transport in transports:
        transport.close()


def test_the_host_is_what_was_asked_for_or_the_primary_address() -> None:
    transport = MooncakeTransport(protocol="tcp")
    host = transport.describe().address.rpartition(":")[0]
    with socket.socket() as probe:
        probe.bind((host, 0))  # an address of this machine, else this raises
    transport.close()


def test_asking_for_rdma_without_a_device_is_refused_with_what_was_looked_for() -> None:
    if preflight.facts(gpus=False).rdma_ports:
        pytest.skip("this machine has an RDMA device")
    with pytest.raises(ConfigError) as caught:
        registry.create("mooncake", protocol="rdma", host="127.0.0.1")
    text = str(caught.value)
    assert "no RDMA device in /sys/class/infiniband" in text
    assert "would work here: p2p_cma, p2p_tcp" in text


def test_an_engine_that_quietly_installed_another_protocol_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    if preflight.facts(gpus=False).rdma_ports:
        pytest.skip("this machine has an RDMA device")
    monkeypatch.setattr(preflight, "require", lambda strategy: preflight.facts(gpus=False))
    monkeypatch.setattr(rdma, "chosen", lambda *_: ())
    with pytest.raises(ConfigError, match="'rdma' was asked for, the engine installed 'tcp' instead"):
        start_engine("rdma", "127.0.0.1", "")


def test_an_unknown_protocol_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="not one of tcp, rdma, nvlink_intra"):
        MooncakeTransport(protocol="roce", host="127.0.0.1")


@pytest.mark.parametrize("name", ["MC_FORCE_HCA", "MC_INTRANODE_NVLINK", "MC_FORCE_MNNVL"])
def test_an_environment_that_steers_mooncake_elsewhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=name):
        MooncakeTransport(protocol="tcp", host="127.0.0.1")


def test_the_environment_is_as_it_was_after_an_engine_was_made() -> None:
    before = dict(os.environ)
    MooncakeTransport(protocol="tcp", host="127.0.0.1").close()
    assert dict(os.environ) == before


def test_descriptions_of_engines_with_several_protocols_match_none_of_ours() -> None:
    assert protocol_of({"protocol": ["tcp", "rdma"]}) == "rdma+tcp"
    assert protocol_of({"protocol": "tcp"}) == "tcp"
    assert buffers_of({"buffers": None}) == []


@pytest.mark.parametrize("writes", [0, 3])
def test_a_program_that_forgets_to_close_ends_by_itself_and_cleanly(writes: int) -> None:
    ends_by_itself("mooncake", {"protocol": "tcp", "host": "127.0.0.1"}, writes)


def test_importing_the_transport_does_not_import_mooncake() -> None:
    program = "import sys, weight_sync.transport.mooncake; sys.exit(any(m.startswith('mooncake') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
