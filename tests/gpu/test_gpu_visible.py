"""cuda_ipc between processes that see one GPU each, both as cuda:0: how Ray, and with it verl, starts workers. Needs two CUDA
devices: run by hand, not in CI."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/gpu needs torch with CUDA")
if not torch.cuda.is_available():
    pytest.skip("tests/gpu needs a CUDA device", allow_module_level=True)

from weight_sync.ids import Deadline  # noqa: E402
from weight_sync.transport.base import Batch, Endpoint, Region  # noqa: E402
from weight_sync.transport.cuda_ipc import CudaIpcTransport  # noqa: E402

NBYTES = 8 << 20
SHORT = 1 << 12  # the kernel's; the rest of a buffer is long enough for a copy engine


def side(connection: Any, value: int) -> None:
    """A buffer of this value. Asked for: where it is, to write it into another's, and how many of its bytes have a value."""
    import torch

    tensor = torch.full((NBYTES,), value, dtype=torch.uint8, device="cuda")
    transport = CudaIpcTransport()
    transport.register([Region(tensor.data_ptr(), NBYTES)])
    connection.send((torch.cuda.device_count(), transport.describe().to_json(), tensor.data_ptr()))
    while (message := connection.recv()) is not None:
        if isinstance(message, int):
            torch.cuda.synchronize()
            connection.send(int((tensor == message).sum()))
            continue
        endpoint, address = Endpoint.from_json(message[0]), message[1]
        transport.probe(endpoint, Deadline.after(60))
        steps, sizes = np.asarray([0, SHORT], np.int64), np.asarray([SHORT, NBYTES - SHORT], np.int64)
        batch = Batch(endpoint, tensor.data_ptr() + steps, address + steps, sizes, ["short", "long"])
        connection.send(transport.wait(transport.write(batch), Deadline.after(60)).nbytes)
    transport.close()


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Pipes to two processes: on the first GPU a buffer of sevens, on the second one of zeros."""
    if torch.cuda.device_count() < 2:  # not above: the processes import this file
        pytest.skip("needs two CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    context, pipes, processes = mp.get_context("spawn"), [], []
    for gpu, value in enumerate((7, 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible[gpu])  # a process that is started inherits it
        pipe, child = context.Pipe()
        processes.append(context.Process(target=side, args=(child, value), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    yield pipes
    for process in processes:
        process.kill()


def said(pipe: Any) -> Any:
    assert pipe.poll(120), "a process says nothing"
    return pipe.recv()


def test_a_process_writes_to_a_gpu_that_it_does_not_see(sides: list[Any]) -> None:
    (seen, *_), (other, endpoint, address) = map(said, sides)
    assert (seen, other) == (1, 1)
    sides[0].send((endpoint, address))
    assert said(sides[0]) == NBYTES
    sides[1].send(7)
    assert said(sides[1]) == NBYTES
