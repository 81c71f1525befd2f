"""Real processes over real Mooncake, stopped in the middle of a write and continued later: nothing reaches verified weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from agent_process import RemoteAgent
from session_support import DENSE, declared

from weight_sync.errors import DeadlineExceeded, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.layout.table import Layout
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import InProcessEngine, InProcessTrainers
from weight_sync.session.inputs import dims_of, layout_of
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.state import State

# 67 MB, most of it in two tensors: long enough on the way to be stopped there.
SIDES = declared(DENSE | {"hidden_size": 512, "vocab_size": 32768, "num_hidden_layers": 1}, {"ranks": 1, "tp": 1}, {"tp": 1})


class Trainers(InProcessTrainers):
    """before: run before a method is called on the ranks."""

    before: dict[str, Callable[[], None]]

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        if method in self.before:
            self.before.pop(method)()
        return super().call(method, payloads, deadline)


class Job:
    def __init__(self, *, slow: bool) -> None:
        self.layouts: tuple[Layout, Layout] = (layout_of(SIDES[0], "trainer"), layout_of(SIDES[1], "rollout"))
        self.processes: list[RemoteAgent] = []
        self.worker = self.start("target", seed=2)
        self.rank = self.start("source", seed=1, slow=slow)
        self.trainers = Trainers([self.rank])  # type: ignore[list-item]
        self.trainers.before = {}
        recording = {0: {"shards": self.layouts[1].rank_to_json(0), "unexplained": {}}}
        self.engine = InProcessEngine(
            "e0", [self.worker], model=SIDES[1].config, sizes=dims_of(SIDES[1], "rollout").sizes, recording=recording
        )  # type: ignore[list-item]
        self.sync = WeightSync(
            self.trainers, [self.engine], SyncSpec(*SIDES), timeouts=Timeouts(connect=30.0, sync=2.0, abort=20.0)
        )

    def patient(self) -> None:
        """From here on syncs shall succeed, however busy the machine is."""
        self.sync._timeouts = Timeouts(connect=60.0, sync=60.0, abort=60.0)

    def start(self, side: str, *, seed: int, slow: bool = False) -> RemoteAgent:
        layout = self.layouts[0 if side == "source" else 1]
        self.processes.append(RemoteAgent(side, layout, 0, seed=seed, slow=slow))
        return self.processes[-1]

    def held(self) -> list[str]:
        """Digests of every byte the worker holds."""
        return self.worker.call("peek", {})["digest"]

    def end(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def job(**options: Any) -> Job:
        jobs.append(Job(**options))
        return jobs[-1]

    yield job
    for one in jobs:
        one.end()


def test_a_trainer_rank_stopped_in_the_middle_of_a_write_and_continued_after_the_next_sync_changes_nothing(
    make: Callable[..., Job],
) -> None:
    job = make(slow=True)
    fresh = job.start("source", seed=7)
    job.sync.connect()
    before, stopped = job.held(), threading.Event()

    def stop_it() -> None:
        while job.held() == before:  # until its first bytes have come
            time.sleep(0.001)
        job.rank.stop()
        job.rank.patience = 0.4
        stopped.set()

    job.trainers.before["write"] = threading.Thread(target=stop_it).start
    with pytest.raises(DeadlineExceeded, match="no reply"):
        job.sync.sync(1)
    assert stopped.is_set()
    assert (job.sync.version, job.sync.state, job.engine.serving) == (-1, State.FAILED, False)
    # The job replaces the rank that does not answer; its process is still there, in the middle of its write.
    ghost = job.rank
    job.trainers._agents[0] = fresh  # type: ignore[assignment]
    job.patient()
    assert job.sync.sync(2).version == 2
    verified = job.held()
    ghost.go_on()
    ghost.patience, ghost._late = 20.0, 0
    with pytest.raises(WeightSyncError, match=r"not written|failed transfer"):  # what it has to say about its write
        ghost._receive()
    assert ghost._receive() == {"failed": True}, "the fence, which it comes to only now"
    assert ghost._receive() == {}, "the release"
    with pytest.raises(WeightSyncError):
        ghost.call("write", {"session": "whatever", "round": 0, "seconds": 5.0})
    time.sleep(0.5)
    assert job.held() == verified
    assert job.sync.sync(3).version == 3
    assert job.held() == verified, "the same weights again"


def test_an_engine_worker_stopped_during_a_write_gets_nothing_of_it_once_a_later_sync_is_verified(
    make: Callable[..., Job],
) -> None:
    job = make(slow=False)
    job.sync.connect()

    def stop_it() -> None:
        job.worker.stop()
        job.worker.patience = 0.4

    job.trainers.before["write"] = stop_it
    with pytest.raises(WeightSyncError, match=r"not written within the deadline"):
        job.sync.sync(1)
    assert (job.sync.version, job.sync.state, job.engine.serving) == (-1, State.FAILED, False)
    with pytest.raises(DeadlineExceeded):
        job.sync.sync(2)  # the worker's end of the fence is missing, so nothing new begins
    assert job.sync.version == -1
    job.rank.call("fill", {"value": 0x5A})  # the trainer steps: its buffers are reused
    job.worker.go_on()
    job.worker.patience = 30.0
    job.patient()
    assert job.sync.sync(3).version == 3
    verified = job.held()
    everything = job.worker.call("count", {"value": 0x5A})["bytes"]
    assert everything == sum(p.numel * 2 for p in job.layouts[1].params)
    time.sleep(1.0)
    assert job.held() == verified
