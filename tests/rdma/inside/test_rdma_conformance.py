"""The suite that every transport must pass, over Mooncake on RDMA verbs between two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rdma_support import FAR, NEAR, WarmPeer, options
from transport_conformance import TransportConformance

from weight_sync.transport.base import Transport
from weight_sync.transport.mooncake import MooncakeTransport


class TestMooncakeRdma(TransportConformance):
    stopped_peer_can_be_written_to = True

    @pytest.fixture
    def make_transport(self) -> Callable[[], Transport]:
        return lambda: MooncakeTransport(**options(NEAR))

    @pytest.fixture(scope="class")
    @classmethod
    def make_peer(cls) -> Iterator[Callable[..., Any]]:
        peers: list[WarmPeer] = []

        def make(nbytes: int, spans: list[tuple[int, int]]) -> WarmPeer:
            peers.append(WarmPeer(options(FAR), nbytes, spans))
            return peers[-1]

        yield make
        for peer in peers:
            peer.end()
