"""The parts of the cuda_ipc transport that need no GPU: which batches it holds on to."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weight_sync.errors import TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Endpoint, Ticket
from weight_sync.transport.cuda_ipc import CudaIpcTransport, _Flight


def in_flight(done: bool, missed: int = 0, refused: bool = False) -> tuple[Any, Ticket]:
    """A transport with one batch launched, without the device under it."""
    one = np.ones(1, np.int64)
    batch = Batch(Endpoint("cuda_ipc", "cuda_ipc", "file@boot", 1), one, one, one, ["w"])
    transport: Any = CudaIpcTransport.__new__(CudaIpcTransport)
    transport._pid, transport._unusable = os.getpid(), None
    transport._file = SimpleNamespace(name="file")
    events = SimpleNamespace(query=lambda: True), SimpleNamespace(query=lambda: done)
    transport._flights = {0: _Flight(batch, events, SimpleNamespace(item=lambda: missed), refused, 0.0)}
    return transport, Ticket(0, batch)


@pytest.mark.parametrize(
    ("done", "missed", "refused", "code"),
    [(False, 0, False, "deadline"), (True, 3, False, "closed peer"), (True, 0, True, "closed peer")],
)
def test_a_batch_that_failed_is_held_until_close_for_its_launch_may_still_read_its_tables(
    done: bool, missed: int, refused: bool, code: str
) -> None:
    transport, ticket = in_flight(done, missed, refused)
    with pytest.raises(TransportError) as caught:
        transport.wait(ticket, Deadline.after(0.01))
    assert caught.value.code == code
    assert transport._flights[0].batch is ticket.batch
    with pytest.raises(TransportError, match="poisoned"):
        transport.wait(ticket, Deadline.after(1))


def test_a_batch_that_arrived_is_let_go_and_waited_for_once() -> None:
    transport, ticket = in_flight(True)
    assert transport.wait(ticket, Deadline.after(1)).nbytes == 1
    assert not transport._flights
    with pytest.raises(ValueError, match="each is waited for once"):
        transport.wait(ticket, Deadline.after(1))
