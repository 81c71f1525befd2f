"""Cross memory attach, against a real second process."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transport_conformance import ARENA, KB, LIMIT, MB, SPANS, Source, TransportConformance
from transport_peer import ProcessPeer

from weight_sync.errors import TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import cma
from weight_sync.transport.base import Batch, Region, Transport
from weight_sync.transport.cma import CmaTransport, process_start


class TestCma(TransportConformance):
    stopped_peer_can_be_written_to = True

    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        return CmaTransport

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        peers: list[ProcessPeer] = []

        def make(nbytes: int, spans: list[tuple[int, int]]) -> ProcessPeer:
            peers.append(ProcessPeer("cma", {"any_tracer": True}, nbytes, spans))
            return peers[-1]

        yield make
        for peer in peers:
            peer.end()

    def test_a_recycled_pid_is_refused(self, source: Source, peer: Any) -> None:
        process, _, host = peer.endpoint.address.partition("@")
        pid, start = process.split(":")
        other = dataclasses.replace(peer.endpoint, address=f"{pid}:{int(start) - 1}@{host}")
        with pytest.raises(TransportError, match="another process now") as caught:
            source.transport.probe(other, Deadline.after(LIMIT))
        assert caught.value.code == "stale epoch"

    def test_a_process_of_another_host_or_pid_namespace_is_refused(self, source: Source, peer: Any) -> None:
        process, _, _ = peer.endpoint.address.partition("@")
        other = dataclasses.replace(peer.endpoint, address=f"{process}@another-boot/4026531836")
        with pytest.raises(TransportError, match="same host"):
            source.transport.probe(other, Deadline.after(LIMIT))

    @pytest.mark.parametrize("address", ["", "12", "a:b@c", "1:2"])
    def test_a_malformed_address_is_refused(self, source: Source, peer: Any, address: str) -> None:
        with pytest.raises(TransportError):
            source.transport.probe(dataclasses.replace(peer.endpoint, address=address), Deadline.after(LIMIT))

    def test_memory_that_the_peer_made_read_only_fails_by_name_after_what_could_be_written(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any]
    ) -> None:
        peer = make_peer(ARENA, SPANS)
        side = Source(make_transport())
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        peer.write_protect(512 * KB, 64 * KB)
        writes = [(0, 16 * KB, 4096), (0, 480 * KB, 64 * KB), (0, 900 * KB, 10)]
        with pytest.raises(TransportError) as caught:
            side.send(peer, writes)
        assert (caught.value.code, caught.value.tensor) == ("EFAULT", "tensor1")
        assert peer.digest() == side.expect(peer, [writes[0], (0, 480 * KB, 32 * KB)])
        self.assert_poisoned(side, peer)

    def test_many_writes_larger_than_one_system_call_takes_arrive_whole(
        self, make_transport: Callable[[], Transport], make_peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cma, "_CALL_BYTES", 100_001)
        peer = make_peer(8 * MB, [(0, 8 * MB)])
        side = Source(make_transport(), 8 * MB)
        side.transport.probe(peer.endpoint, Deadline.after(LIMIT))
        writes = [(0, 0, 3 * MB + 1), (3 * MB + 1, 4 * MB, 1), (5 * MB, 5 * MB, 2 * MB)]
        assert side.send(peer, writes) == 5 * MB + 2
        assert peer.digest() == side.expect(peer, writes)
        side.transport.close()

    def test_a_kernel_that_moves_only_part_of_a_call_is_asked_again_for_the_rest(
        self, source: Source, peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = source.transport._libc.process_vm_writev
        calls = []

        class Stingy:
            process_vm_readv = source.transport._libc.process_vm_readv

            @staticmethod
            def process_vm_writev(pid: int, local: int, count: int, remote: int, _: int, flags: int) -> int:
                vectors = [(ctypes.c_int64 * 2).from_address(at)[:] for at in (local, remote)]
                for vector in vectors:
                    vector[1] = min(vector[1], 1000)
                calls.append(count)
                pair = (ctypes.c_int64 * 4)(*vectors[0], *vectors[1])
                return real(pid, ctypes.addressof(pair), 1, ctypes.addressof(pair) + 16, 1, flags)

        monkeypatch.setattr(source.transport, "_libc", Stingy)
        writes = [(0, 16 * KB, 3500), (9000, 100 * KB, 10), (20_000, 200 * KB, 2001)]
        assert source.send(peer, writes) == 5511
        assert peer.digest() == source.expect(peer, writes)
        assert len(calls) > 7

    def test_a_peer_that_closes_is_left_alone_from_the_next_system_call_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cma, "_CALL_BYTES", 1000)
        here, there = np.ones(4000, np.uint8), np.zeros(4000, np.uint8)
        writer, peer = CmaTransport(), CmaTransport()
        for transport, array in ((writer, here), (peer, there)):
            transport.register([Region(int(array.ctypes.data), array.nbytes)])
        endpoint = peer.describe()
        writer.probe(endpoint, Deadline.after(LIMIT))
        real = writer._libc.process_vm_writev

        class Closing:
            process_vm_readv = writer._libc.process_vm_readv

            @staticmethod
            def process_vm_writev(*words: Any) -> int:
                moved = real(*words)
                if moved == 1000:
                    peer.close()
                return moved

        monkeypatch.setattr(writer, "_libc", Closing)
        at = [np.asarray([int(array.ctypes.data)], np.int64) for array in (here, there)]
        ticket = writer.write(Batch(endpoint, *at, np.asarray([4000], np.int64), ["w"]))
        with pytest.raises(TransportError, match="closed or replaced"):
            writer.wait(ticket, Deadline.after(LIMIT))
        assert there.sum() == 1000
        with pytest.raises(TransportError, match="poisoned"):
            writer.write(ticket.batch)
        writer.close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
    def test_another_users_process_cannot_be_written_to_and_the_error_says_what_to_do(self, peer: Any) -> None:
        child = os.fork()
        if child == 0:  # in the child: no pytest, no cleanup, only an exit code
            status = 1
            try:
                os.setuid(65534)
                CmaTransport().probe(peer.endpoint, Deadline.after(LIMIT))
            except TransportError as error:
                status = 0 if error.code == "EPERM" and "ptrace_scope" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_is_named_by_pid_and_start_time() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) > 0
    assert process_start(os.getppid()) <= process_start(os.getpid())
    with pytest.raises(ProcessLookupError):
        process_start(2**22 + 1)


def test_a_zombie_is_no_process() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(ProcessLookupError):
            process_start(child)
    finally:
        os.waitpid(child, 0)


def test_kernel_refusals_are_explained() -> None:
    assert "any_tracer=True" in cma.explain(errno.EPERM)
    assert "ended" in cma.explain(errno.ESRCH)
    assert "mapped" in cma.explain(errno.EFAULT)
