"""`+weight_sync=p2p_rdma` from its config to its report: trainer ranks and engine workers in their own processes, over verbs.

The ranks, their agents, the session, the plan, the transport and the observers are the real ones. Trainer and engine themselves
are doubles that hold arrays instead of a model (weight_sync/session/inprocess.py): real ones are too heavy for an emulated CPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_process
import numpy as np
import pytest
from agent_process import RemoteAgent
from rdma_support import ADDRESS, FAR, NEAR, WarmProcess
from session_support import DENSE, declared

from weight_sync.config import compose_job, failure_policy
from weight_sync.errors import ConfigError, VerifyError, WeightSyncError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Layout
from weight_sync.observe.observer import open_observer
from weight_sync.schema import SyncConf
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import InProcessEngine, InProcessTrainers
from weight_sync.session.inputs import Declared, dims_of, layout_of
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.state import State
from weight_sync.session.verify import Level
from weight_sync.transport import preflight

EXPERTS = declared()
"""A mixture of experts: 2 trainer ranks (tp2, ep2), one engine of 2 workers (tp2)."""
DENSE_MODEL = declared(DENSE | {"num_hidden_layers": 1})
"""The same ranks, fewer tensors: planning takes long where everything is emulated."""
PATIENCE = 120.0


@functools.cache
def composed(strategy: str, *overrides: str) -> SyncConf:
    """What train.py would be told by these words. Takes long where everything is emulated."""
    return compose_job([f"+weight_sync={strategy}", *overrides]).weight_sync


class Job:
    """What weight_sync_integrations.job makes of a config, with doubles in the place of Ray, trainer and servers."""

    def __init__(
        self, folder: Path, *overrides: str, strategy: str = "p2p_rdma", sides: tuple[Declared, Declared] = DENSE_MODEL
    ) -> None:
        self.conf = composed(strategy, *overrides)
        preflight.require(self.conf.strategy)
        self.layouts: tuple[Layout, Layout] = (layout_of(sides[0], "trainer"), layout_of(sides[1], "rollout"))
        self.ranks = [self._agent("source", rank, NEAR) for rank in range(self.layouts[0].world)]
        self.workers = [self._agent("target", rank, FAR) for rank in range(self.layouts[1].world)]
        self.trainers = InProcessTrainers(self.ranks)  # type: ignore[arg-type]
        recording = {w.rank: {"shards": self.layouts[1].rank_to_json(w.rank), "unexplained": {}} for w in self.workers}
        self.engine = InProcessEngine(
            "engine-0",
            self.workers,  # type: ignore[arg-type]
            model=sides[1].config,
            sizes=dims_of(sides[1], "rollout").sizes,
            recording=recording,
        )
        self.noise = np.random.default_rng(0)
        self.observer = open_observer(folder, strategy=self.conf.strategy, wandb_mode="disabled")
        self.sync = WeightSync(
            self.trainers,
            [self.engine],
            SyncSpec(*sides),
            timeouts=Timeouts(connect=PATIENCE, sync=PATIENCE, abort=self.conf.timeouts.abort),
            observer=self.observer,
            failure=failure_policy(self.conf),
            level=Level(self.conf.verify.level.value),
        )

    def _agent(self, side: str, rank: int, device: str, **more: str) -> RemoteAgent:
        options = {**self.conf.transport.options, "devices": device, "host": ADDRESS[device], **more}
        layout = self.layouts[0 if side == "source" else 1]
        agent = RemoteAgent(
            side,
            layout,
            rank,
            seed=100 * len(side) + rank,
            transport=self.conf.transport.name,
            options=options,
            start=lambda words: WarmProcess(agent_process.main, *words),
        )
        agent.patience = PATIENCE
        return agent

    def step(self) -> list[dict[str, str]]:
        """An optimiser step: other values in every tensor. Returns what the engine's workers must hold after a sync of them."""
        trainer, rollout = self.layouts
        hf = {
            name: self.noise.integers(0, 1 << 16, pattern.shape, np.uint16)
            for pattern in trainer.catalog.patterns
            for name in pattern.names()
        }
        for rank in self.ranks:
            rank.call("load", {"raw": placed(trainer, rank.rank, hf, {})})
        return [placed(rollout, worker.rank, hf, held) for worker, held in zip(self.workers, self.held(), strict=True)]

    def held(self) -> list[dict[str, str]]:
        """Every byte of the engine's live parameters."""
        return [worker.call("dump", {})["raw"] for worker in self.workers]

    def end(self) -> None:
        for agent in (*self.ranks, *self.workers):
            agent.end()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def job(*overrides: str, **more: Any) -> Job:
        jobs.append(Job(tmp_path / f"run{len(jobs)}", *overrides, **more))
        return jobs[-1]

    yield job
    for one in jobs:
        one.end()


def placed(layout: Layout, rank: int, hf: dict[str, np.ndarray[Any, Any]], before: dict[str, str]) -> dict[str, str]:
    """A rank's parameters with these HF tensors in their places; `before` (zeros) elsewhere. In hex, for a pipe."""
    flat = {
        p.name: np.frombuffer(bytes.fromhex(before[p.name]), np.uint16).copy() if before else np.zeros(p.numel, np.uint16)
        for p in layout.rank_params(rank)
    }
    for shard in layout.rank_shards(rank):
        cut = tuple(slice(o, e) for o, e in zip(shard.box.offset, shard.box.end, strict=True))
        strides = tuple(2 * stride for stride in shard.strides)
        np.lib.stride_tricks.as_strided(flat[shard.param][shard.start :], shard.box.shape, strides)[...] = hf[shard.tensor][cut]
    return {name: array.tobytes().hex() for name, array in flat.items()}


def payload(layout: Layout) -> int:
    return sum((p.numel - p.filling) * ITEMSIZE[p.dtype] for p in layout.params)


def test_three_syncs_of_a_small_model_over_verbs_leave_the_report_that_every_job_leaves(make: Callable[..., Job]) -> None:
    job = make(sides=EXPERTS)
    with job.observer:
        for version in (1, 2, 3):
            expected = job.step()
            outcome = job.sync.sync(version)
            assert (outcome.version, outcome.bytes) == (version, payload(job.layouts[1]))
            assert job.held() == expected
            assert (job.engine.version, job.engine.serving) == (version, True)
    report = json.loads(job.observer.report.path.read_text())
    assert report["strategy"] == "p2p_rdma"
    assert (report["committed_version"], report["error"], report["finished"]) == (3, None, True)
    assert [(s["version"], s["verified"], s["committed"], s["bytes"]) for s in report["syncs"]] == [
        (version, True, True, payload(job.layouts[1])) for version in (1, 2, 3)
    ]
    for sync in report["syncs"]:
        assert {"pause", "write", "verify", "commit", "resume"} <= set(sync["phases"])
    # Left for whoever started the guest.
    if Path("/share").is_dir():
        Path("/share/report.json").write_text(json.dumps(report, indent=2))


def test_nixl_over_verbs_commits_the_same_bytes_and_leaves_the_same_report(make: Callable[..., Job]) -> None:
    job = make(strategy="p2p_nixl_rdma")
    with job.observer:
        for version in (1, 2):
            expected = job.step()
            assert job.sync.sync(version).version == version
            assert job.held() == expected
    report = json.loads(job.observer.report.path.read_text())
    assert (report["strategy"], report["committed_version"], report["error"]) == ("p2p_nixl_rdma", 2, None)
    assert [(s["verified"], s["committed"], s["bytes"]) for s in report["syncs"]] == [(True, True, payload(job.layouts[1]))] * 2


def test_full_verification_reads_every_byte_back_over_verbs(make: Callable[..., Job]) -> None:
    job = make("weight_sync.verify.level=full")
    expected = job.step()
    assert job.sync.sync(1).version == 1
    assert job.held() == expected


def test_a_worker_whose_pages_were_exchanged_behind_its_registration_is_not_committed(make: Callable[..., Job]) -> None:
    """Every write is reported complete, into pages that the worker no longer sees. The digest of its live memory says so."""
    job = make()
    job.step()
    job.sync.sync(1)
    job.workers[1].call("other pages", {})
    job.step()
    with pytest.raises(VerifyError):
        job.sync.sync(2)
    assert (job.sync.version, job.sync.state, job.engine.serving) == (1, State.FAILED, False)


def test_a_worker_killed_during_a_write_costs_the_deadline_and_the_engine_stays_paused(make: Callable[..., Job]) -> None:
    job = make()
    job.step()
    job.sync.sync(1)
    job.sync._timeouts = Timeouts(connect=PATIENCE, sync=5.0, abort=job.conf.timeouts.abort)
    original = job.trainers.call

    def call(method: str, *words: Any) -> Any:
        if method == "write":
            job.workers[0]._process.kill()
        return original(method, *words)

    job.trainers.call = call  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError):
        job.sync.sync(2)
    assert (job.sync.version, job.engine.serving) == (1, False)
    # The fence: every rank has closed its transport, and may step again.
    assert all(rank.call("describe", {})["session"] is None for rank in job.ranks)


def test_a_device_that_does_not_exist_is_refused_before_anything_is_paused(make: Callable[..., Job]) -> None:
    job = make()
    before = job.held()[0]
    job.workers[1].end()
    job.workers[1] = job._agent("target", 1, FAR, devices="mlx5_7")
    job.engine._agents[1] = job.workers[1]  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="names mlx5_7, which this machine does not have"):
        job.sync.connect()
    assert (job.engine.serving, job.sync.version) == (True, -1)
    assert job.held()[0] == before
