"""Where RDMA behaves otherwise than tcp, each difference pinned by one test; docs/rdma.md lists them.

`raw` is Mooncake's own engine with none of our checks around it: what it does is what our checks are for.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rdma_support import ADDRESS, FAR, NEAR, WarmPeer, options
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source
from transport_peer import CANARY, Arena

from weight_sync.errors import ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import preflight, rdma
from weight_sync.transport.mooncake import CLOSE_SECONDS_PER_DEVICE, MooncakeTransport
from weight_sync.transport.mooncake_engine import engine_environment, protocol_of, published, start_engine

START = 16 * KB
"""Offset of a peer's first span."""


@pytest.fixture
def make_peer() -> Iterator[Callable[..., WarmPeer]]:
    peers: list[WarmPeer] = []

    def make(nbytes: int = ARENA, spans: Any = SPANS, **more: Any) -> WarmPeer:
        environment = more.pop("environment", None)
        peers.append(WarmPeer(options(FAR) | more, nbytes, spans, environment))
        return peers[-1]

    yield make
    for peer in peers:
        peer.end()


@pytest.fixture
def source() -> Iterator[Source]:
    side = Source(MooncakeTransport(**options(NEAR)))
    yield side
    side.transport.close()


class Raw:
    """An engine with one registered arena of sevens."""

    def __init__(self, protocol: str = "rdma", nbytes: int = ARENA) -> None:
        self.engine = start_engine(protocol, ADDRESS[NEAR], NEAR if protocol == "rdma" else "")[0]
        self.arena = Arena(nbytes)
        self.arena.data[:] = 7
        assert self.engine.register_memory(self.arena.base, nbytes) == 0

    def write(self, peer: WarmPeer, here: int, there: int, nbytes: int) -> int:
        return self.engine.transfer_sync_write(peer.endpoint.address, here, there, nbytes)


# --- registered memory and keys


@pytest.mark.parametrize(("protocol", "status"), [("rdma", -1), ("tcp", 0)])
def test_a_local_buffer_that_is_not_registered_is_refused_by_rdma_and_sent_by_tcp(
    make_peer: Callable[..., WarmPeer], protocol: str, status: int
) -> None:
    peer = make_peer(**({} if protocol == "rdma" else {"protocol": "tcp", "devices": ""}))
    raw, stranger = Raw(protocol), Arena(ARENA)
    assert raw.write(peer, stranger.base, peer.base + START, 4 * KB) == status
    assert raw.write(peer, raw.arena.base, peer.base + START, 4 * KB) == 0, "the engine is usable after that"
    assert peer.count(7) == 4 * KB


@pytest.mark.parametrize(
    ("there", "inside"), [(-1, 0), (START + MB - 4, 4)], ids=["never registered", "across the end of a region"]
)
def test_remote_memory_that_is_not_registered_is_refused_by_the_device_itself(
    make_peer: Callable[..., WarmPeer], there: int, inside: int
) -> None:
    """A write across the end of a region is cut there by Mooncake: it fails, and what lies inside has landed."""
    peer, raw, landed = make_peer(), Raw(), Arena(ARENA)
    address = peer.base + there if there >= 0 else 0x1000
    assert raw.write(peer, raw.arena.base, address, 8) == -1
    landed.data[max(there, 0) : max(there, 0) + inside] = 7
    assert peer.digest() in {Arena(ARENA).digest(), landed.digest()}
    assert raw.write(peer, raw.arena.base, peer.base + START, 8) == 0


def test_a_key_of_memory_that_was_registered_anew_is_renewed_without_a_word_so_only_the_epoch_tells(
    make_peer: Callable[..., WarmPeer],
) -> None:
    peer, raw = make_peer(), Raw()
    assert raw.write(peer, raw.arena.base, peer.base + START, 64) == 0
    assert peer.ask("unregister") == [0, 0]
    assert raw.write(peer, raw.arena.base, peer.base + START, 64) == -1, "the key is stale, and there is no new one"
    assert peer.ask("register again") == [0, 0]
    assert raw.write(peer, raw.arena.base, peer.base + START + 4 * KB, 64) == 0, "Mooncake has asked the peer for its new key"
    assert peer.count(7) == 128
    # An engine that takes another's place has another epoch, whatever its keys are.
    stale = dataclasses.replace(peer.endpoint, epoch=peer.endpoint.epoch + 1)
    side = Source(MooncakeTransport(**options(NEAR)))
    with pytest.raises(TransportError, match="stale endpoint"):
        side.transport.probe(stale, Deadline.after(LIMIT))
    side.transport.close()


def test_a_write_into_pages_that_the_peer_no_longer_has_succeeds_and_is_seen_by_nobody(
    source: Source, make_peer: Callable[..., WarmPeer]
) -> None:
    """Registered pages stay pinned, so the device goes on writing to them. Only a digest of live memory can tell."""
    peer = make_peer(ARENA, [(0, ARENA)])
    source.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    assert peer.ask("map other pages")
    peer.fill(CANARY)
    assert source.send(peer, [(0, 0, MB)]) == MB, "reported written"
    assert peer.digest() == Arena(ARENA).digest(), "and nothing is there"


def test_a_child_forked_after_registration_does_not_take_the_registered_pages_with_it(
    source: Source, make_peer: Callable[..., WarmPeer]
) -> None:
    """Linux 5.12 and later copy pinned pages for the child at the fork, so that the parent keeps those the device writes to."""
    peer = make_peer()
    source.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    child = peer.ask("fork")
    try:
        assert source.send(peer, [(0, START, MB)]) == MB
        assert peer.digest() == source.expect(peer, [(0, START, MB)])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_buffer_longer_than_a_device_registers_at_a_time_is_still_one_region(make_peer: Callable[..., WarmPeer]) -> None:
    """Mooncake cuts it and publishes the parts; a write across a cut must neither be refused nor be lost."""
    peer = make_peer(environment={"MC_MAX_MR_SIZE": str(256 * KB)})
    host, port = peer.endpoint.address.split(":")
    assert len(published(host, int(port), Deadline.after(LIMIT))["buffers"]) > len(SPANS) + 1
    side = Source(MooncakeTransport(**options(NEAR)))
    side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    writes = [(0, START, MB - 5), (3, MB + 256 * KB, 256 * KB)]
    side.send(peer, writes)
    assert peer.digest() == side.expect(peer, writes)
    side.transport.close()


# --- peers that stop or die


def test_a_stopped_peer_takes_writes_of_old_acquaintances_and_no_new_ones(
    source: Source, make_peer: Callable[..., WarmPeer]
) -> None:
    """One-sided means without the peer's program; making a connection needs it."""
    peer = make_peer()
    source.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    peer.stop()
    assert source.send(peer, [(0, START, MB)]) == MB
    late = Source(MooncakeTransport(**options(NEAR)))
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        late.transport.probe(peer.endpoint, Deadline.after(1.0))
    assert caught.value.code == "deadline"
    assert 0.9 < time.monotonic() - began < 5.0
    late.transport.close()
    peer.go_on()
    assert peer.digest() == source.expect(peer, [(0, START, MB)])


@pytest.mark.parametrize("devices", [NEAR, ""], ids=["one device", "all devices"])
def test_a_write_to_a_killed_peer_is_never_reported_so_our_deadline_ends_it_and_closing_takes_its_time(
    make_peer: Callable[..., WarmPeer], devices: str
) -> None:
    """tcp sees the closed connection; here nothing comes back, and Mooncake waits 10 s for each device before it gives up."""
    dead, other = make_peer(devices=devices), make_peer()
    side = Source(MooncakeTransport(**options(NEAR) | {"devices": devices}))
    for peer in (dead, other):
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    dead.kill()
    began = time.monotonic()
    tickets = [side.transport.write(side.batch(dead, [(i * 64 * KB, START, 64 * KB)])) for i in range(8)]
    with pytest.raises(TransportError) as caught:
        side.transport.wait(tickets[0], Deadline.after(2.0))
    assert caught.value.code in ("deadline", -1)
    assert time.monotonic() - began < 6.0, "the deadline held"
    assert caught.value.tensor == "tensor0"
    with pytest.raises(TransportError, match="poisoned"):
        side.send(other, [(0, START, 8)])
    began = time.monotonic()
    side.transport.close()
    assert time.monotonic() - began < CLOSE_SECONDS_PER_DEVICE * (2 if devices == "" else 1)
    fresh = Source(MooncakeTransport(**options(NEAR)))
    fresh.transport.probe(other.endpoint, Deadline.after(LIMIT))
    assert fresh.send(other, [(0, START, MB)]) == MB
    fresh.transport.close()


# --- devices


def test_a_device_that_is_not_there_is_refused_where_mooncake_installs_tcp_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=rf"names mlx5_9, which this machine does not have; RDMA devices here: .*{NEAR}"):
        MooncakeTransport(**options() | {"devices": f"{NEAR}, mlx5_9"})
    monkeypatch.setattr(rdma, "chosen", lambda *_: ())
    with pytest.raises(ConfigError, match="'rdma' was asked for, the engine installed 'tcp' instead"):
        start_engine("rdma", ADDRESS[NEAR], "mlx5_9")


def test_spaces_in_a_list_of_devices_would_cost_mooncake_the_second_one() -> None:
    two = f"{NEAR}, {FAR}"
    with engine_environment("rdma"):
        engine = preflight.load_mooncake().TransferEngine()
        assert engine.initialize(f"{ADDRESS[NEAR]}:0", "P2PHANDSHAKE", "rdma", two) == 0
    raw = published("127.0.0.1", engine.get_rpc_port(), Deadline.after(LIMIT))
    assert (protocol_of(raw), [device["name"] for device in raw["devices"]]) == ("rdma", [NEAR])
    assert start_engine("rdma", ADDRESS[NEAR], two)[2] == tuple(sorted({NEAR, FAR}))


def test_one_write_goes_through_one_device_and_only_writes_of_an_even_number_of_slices_take_turns(
    make_peer: Callable[..., WarmPeer],
) -> None:
    """Mooncake draws our device once for each write and the peer's once for each slice of it (64 KiB), from one generator whose
    lowest bit changes with every draw. So with two devices a write of one slice, two draws, leaves the turn where it was."""
    if NEAR == FAR:
        pytest.skip("this machine has one usable RDMA device")
    everywhere = options(NEAR) | {"devices": f"{NEAR},{FAR}"}
    peer, side = make_peer(), Source(MooncakeTransport(**everywhere))
    side.transport.probe(peer.endpoint, Deadline.after(LIMIT))

    def sent(nbytes: int) -> list[int]:
        """Packets sent by either device for 1 MiB in writes of so many bytes: the data of a device, or answers alone."""
        time.sleep(0.05)  # counters in sysfs are renewed every 12 ms
        before = rdma.transmitted([NEAR, FAR])
        side.send(peer, [(at, START + at, nbytes) for at in range(0, MB, nbytes)])
        time.sleep(0.05)
        after = rdma.transmitted([NEAR, FAR])
        return sorted(after[name] - before[name] for name in before)

    few, most = sent(MB)
    assert few * 3 < most, f"one write: {few} packets by one device, {most} by the other"
    few, most = sent(32 * KB)
    assert few * 3 < most, f"32 writes of one slice: {few} packets by one device, {most} by the other"
    few, most = sent(128 * KB)
    assert few * 2 > most, f"8 writes of two slices: {few} packets by one device, {most} by the other"
    assert peer.digest() == side.expect(peer, [(0, START, MB)])
    side.transport.close()


# --- GIDs


def test_mooncake_chooses_an_ipv4_gid_and_takes_the_one_it_is_told(
    make_peer: Callable[..., WarmPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = next(port for port in rdma.ports() if port.device == NEAR)
    if len(port.gids) < 2:
        pytest.skip(f"one GID only: {port}")

    def used(peer: WarmPeer) -> Any:
        host, number = peer.endpoint.address.split(":")
        (device,) = published(host, int(number), Deadline.after(LIMIT))["devices"]
        return bytes.fromhex(device["gid"].replace(":", ""))

    def packed(gid: rdma.Gid) -> bytes:
        return bytes.fromhex(gid.value.replace(":", ""))

    assert used(make_peer(**options(NEAR))) == packed(next(gid for gid in port.gids if gid.address == ADDRESS[NEAR]))
    for gid in port.gids:
        assert used(make_peer(**options(NEAR), environment={"MC_GID_INDEX": str(gid.index)})) == packed(gid)
    for value in ("200", "two"):
        monkeypatch.setenv("MC_GID_INDEX", value)
        with pytest.raises(ConfigError, match=f"MC_GID_INDEX={value}: no such GID on {NEAR}"):
            MooncakeTransport(**options(NEAR))


def test_a_gid_that_is_asked_for_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake reads its variables when it is imported, and never again."""
    port = next(port for port in rdma.ports() if port.device == NEAR)
    MooncakeTransport(**options(NEAR)).close()
    other = [gid.index for gid in port.gids if gid.address != ADDRESS[NEAR]]
    if not other:
        pytest.skip(f"one GID only: {port}")
    monkeypatch.setenv("MC_GID_INDEX", str(other[0]))
    with pytest.raises(ConfigError, match="was set after this process had imported Mooncake"):
        MooncakeTransport(**options(NEAR))


# --- limits


def test_too_little_locked_memory_is_refused_before_and_found_out_at_registration() -> None:
    """The first by preflight; the second, for a limit that looks large enough, by the driver."""
    import subprocess
    import sys

    program = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from transport_peer import Arena
from weight_sync.errors import WeightSyncError
from weight_sync.transport import preflight
from weight_sync.transport.mooncake import MooncakeTransport
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
try:
    MooncakeTransport(**{options(NEAR)!r})
except WeightSyncError as error:
    print(type(error).__name__, str(error).splitlines()[0])
preflight._ENOUGH_MEMLOCK = 0
transport, arena = MooncakeTransport(**{options(NEAR)!r}), Arena(8 << 20)
try:
    transport.register(arena.regions([(0, 8 << 20)]))
except WeightSyncError as error:
    print(type(error).__name__, error)
"""
    # Whoever may lock memory anyway (root) is not limited; so the program gives that up first.
    words = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    before, after = done.stdout.splitlines()
    assert before.startswith("ConfigError p2p_rdma cannot work on this machine: only 4194304 bytes may be pinned"), done.stderr
    assert "Mooncake refused to register 1 regions, 8388608 bytes (rdma: is the memlock limit large enough?" in after


# --- proof


def test_a_probe_is_seen_in_the_packet_counters_of_this_sides_device(
    source: Source, make_peer: Callable[..., WarmPeer]
) -> None:
    peer = make_peer()
    source.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    moved = source.transport.proofs[peer.endpoint]  # type: ignore[attr-defined]
    assert moved
    assert all(name.startswith(f"{NEAR}/") and count > 0 for name, count in moved.items())


def test_a_probe_that_no_device_has_sent_a_packet_for_is_refused_and_nothing_registered_was_touched(
    make_peer: Callable[..., WarmPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if NEAR == FAR:
        pytest.skip("peers at one address are not judged")
    monkeypatch.setattr(rdma, "transmitted", lambda devices: {f"{NEAR}/1 sent_pkts": 12})
    peer, side = make_peer(), Source(MooncakeTransport(**options(NEAR)))
    with pytest.raises(TransportError, match="no RDMA device of this side has sent a packet for it") as caught:
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
    assert caught.value.code == "not on the wire"
    with pytest.raises(TransportError, match="poisoned"):
        side.send(peer, [(0, START, 8)])
    side.transport.close()
    assert np.array_equal(peer.digest(), Arena(ARENA).digest())
