"""NIXL over RDMA verbs between two processes: the suite that every transport must pass, what makes NIXL find the devices, and
what it does with keys that are no longer good. Its end-to-end test is in test_rdma_session.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rdma_support import FAR, NEAR, WarmPeer, options
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source, TransportConformance
from transport_peer import CANARY, Arena

from weight_sync.errors import ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import nixl, preflight, rdma
from weight_sync.transport.base import Transport
from weight_sync.transport.nixl import NixlTransport

START = 16 * KB
"""Offset of a peer's first span."""


# --- devices and limits


def test_a_device_that_is_not_there_is_refused_where_ucx_would_use_what_is_left() -> None:
    with pytest.raises(ConfigError, match="names mlx5_7, which this machine does not have"):
        NixlTransport(**options(NEAR) | {"devices": f"{NEAR},mlx5_7"})


def test_every_usable_device_has_a_driver_in_the_systems_libibverbs() -> None:
    found = preflight.facts(gpus=False)
    assert found.driven is not None
    assert {NEAR, FAR} <= set(found.driven)
    assert preflight.reachable(found)["p2p_nixl_rdma"] is None


def test_nixl_alone_finds_no_device_where_the_drivers_are_not_in_its_own_folder() -> None:
    """Its wheel's libibverbs looks in /usr/lib64/libibverbs; the transport puts the system's before it, in a way that lets the
    program end well. NIXL's own, after its failure, was seen to crash at the end."""
    ours = "from weight_sync.transport.nixl_agent import load_nixl; B = load_nixl()"
    theirs = "import nixl_cu12._bindings as B"
    outcomes = {}
    for name, loading in (("ours", ours), ("theirs", theirs)):
        program = f"""
import os
os.environ.update(UCX_TLS="rc,ud,self", UCX_LOG_FILE="stderr")
{loading}
config = B.nixlAgentConfig()
config.useProgThread = False
try:
    B.nixlAgent("a", config).createBackend("UCX", {{}})
    print("devices")
except B.nixlBackendError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
        assert name == "theirs" or done.returncode == 0, done.stderr[-500:]
        outcomes[name] = done.stdout.strip()
    assert outcomes["ours"] == "devices"
    if outcomes["theirs"] == "devices":
        pytest.skip("the drivers of this machine are where NIXL's own libibverbs looks for them")
    assert outcomes["theirs"] == "NIXL_ERR_BACKEND"


def test_a_memlock_limit_that_is_reached_is_an_error_at_registration() -> None:
    program = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from transport_peer import Arena
from weight_sync.errors import WeightSyncError
from weight_sync.transport import preflight
from weight_sync.transport.nixl import NixlTransport
preflight._ENOUGH_MEMLOCK = 0
transport, arena = NixlTransport(**{options(NEAR)!r}), Arena(64 << 20)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 << 20, 16 << 20))
try:
    transport.register(arena.regions([(0, 64 << 20)]))
    print("registered")
except WeightSyncError as error:
    print(type(error).__name__, error)
"""
    words = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert "NIXL refused to register 1 regions, 67108864 bytes (rdma: is the memlock limit large enough?)" in done.stdout, (
        done.stderr[-500:]
    )


class TestNixlRdma(TransportConformance):
    stopped_peer_can_be_written_to = True

    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        return lambda: NixlTransport(**options(NEAR))

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        peers: list[WarmPeer] = []

        def make(nbytes: int, spans: list[tuple[int, int]]) -> WarmPeer:
            peers.append(WarmPeer(options(FAR), nbytes, spans, transport="nixl"))
            return peers[-1]

        yield make
        for peer in peers:
            peer.end()

    def test_a_peer_that_dies_halfway_is_one_error_and_poisons_the_transport(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        """Dead before the first write: a soft device moves whole writes inside the call that posts them, so that all of the
        suite's were acknowledged before its kill."""
        peer = make_peer(ARENA, SPANS)
        side = Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.send(peer, [(0, START, 64)]) == 64
        peer.kill()
        started = time.monotonic()
        tickets = [side.transport.write(side.batch(peer, [(0, START, MB)])) for _ in range(3)]
        with pytest.raises(TransportError) as caught:
            side.transport.wait(tickets[0], Deadline.after(5.0))
        assert (caught.value.code, caught.value.tensor) == ("deadline", "tensor0")
        assert time.monotonic() - started < 15.0
        self.assert_poisoned(side, peer)
        side.transport.close()

    # --- proof

    def test_a_probe_is_seen_in_the_packet_counters_of_this_sides_device(self, source: Source, peer: Any) -> None:
        moved = source.transport.proofs[peer.endpoint]  # type: ignore[attr-defined]
        assert moved
        assert all(name.startswith(f"{NEAR}/") and count > 0 for name, count in moved.items())

    def test_a_probe_that_no_device_has_sent_a_packet_for_is_refused(
        self, make_transport: Callable[[], Transport], peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if NEAR == FAR:
            pytest.skip("peers at one address are not judged")
        monkeypatch.setattr(rdma, "transmitted", lambda devices: {f"{NEAR}/1 sent_pkts": 12})
        side = Source(make_transport())
        with pytest.raises(TransportError, match="no RDMA device of this side has sent a packet for it") as caught:
            side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert caught.value.code == "not on the wire"
        with pytest.raises(TransportError, match="poisoned"):
            side.send(peer, [(0, START, 8)])
        side.transport.close()
        assert peer.digest() == Arena(ARENA).digest()

    # --- keys

    def test_a_key_of_memory_that_was_registered_anew_is_refused_by_the_device_and_nothing_arrives(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        """Mooncake fetches the new key and goes on; NIXL keeps the old one, which fails."""
        peer, side = make_peer(ARENA, SPANS), Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert side.send(peer, [(0, START, 64)]) == 64
        assert peer.ask("unregister")
        assert peer.ask("register again")
        before = peer.digest()
        with pytest.raises(TransportError) as caught:
            side.send(peer, [(64, START, 64)], LIMIT)
        assert caught.value.tensor == "tensor0"
        self.assert_poisoned(side, peer)
        side.transport.close()
        assert peer.digest() == before

    def test_what_the_peer_did_not_publish_is_refused_by_nixl_too_and_nothing_is_sent(
        self, source: Source, peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nixl, "check_remote", lambda *_: None)
        with pytest.raises(TransportError, match="nothing was sent: NIXL_ERR") as caught:
            source.send(peer, [(0, 0, 64)])
        assert caught.value.code in ("NIXL_ERR_NOT_FOUND", "NIXL_ERR_UNKNOWN")
        monkeypatch.undo()
        assert source.send(peer, [(0, START, 64)]) == 64, "the transport is usable after that"

    def test_pages_that_the_peer_no_longer_has_are_written_and_seen_by_nobody(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        """As with Mooncake: only a digest of live memory can tell."""
        peer, side = make_peer(ARENA, [(0, ARENA)]), Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        assert peer.ask("map other pages")
        peer.fill(CANARY)
        assert side.send(peer, [(0, 0, MB)]) == MB, "reported written"
        assert peer.digest() == Arena(ARENA).digest(), "not a byte is in the peer's memory"
        side.transport.close()
