"""cuda_ipc between two GPUs: which link takes which range, and syncs that were measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_p2p
import predict_nvlink
from conftest import work_from

from weight_sync.plan.planner import make_plan
from weight_sync.plan.runs import inner_elements
from weight_sync.plan.schedule import make_schedule
from weight_sync.session.inputs import layout_of
from weight_sync.simulate import Faults, Options, load_cluster
from weight_sync.simulate.cluster import parse_cluster
from weight_sync.simulate.network import Network, place
from weight_sync.simulate.sync import run
from weight_sync.simulate.work import LONG, Work, repeated, work_of
from weight_sync.transport.ipc_copies import COPY_FROM

EXACT = Options(verify=False, steps=10**6)


def seconds(plain: dict[str, Any], work: Work, transport: str, options: Options = EXACT) -> float:
    cluster = parse_cluster(plain, "test")
    placed = place(cluster, work.trainers, work.rollouts, share_nodes=True)
    return run(work, Network(cluster, placed, Faults(), transport), options).prediction.seconds


def test_long_ranges_of_cuda_ipc_go_at_the_rate_of_one_copy_and_the_rest_at_its_kernels(plain: dict[str, Any]) -> None:
    plain["local"]["ipc"] = 50.0
    work = work_from([[100]])
    mixed = replace(work, rounds=(replace(work.rounds[0], long=np.array([80.0])),))
    assert seconds(plain, mixed, "ipc") == pytest.approx(80 / 100 + 20 / 50)
    assert seconds(plain, mixed, "nvlink") == pytest.approx(1.0)
    relay = Options(verify=False, steps=10**6, relay=True, engines=2, bucket=float(LONG))
    twice = repeated(mixed, 2)
    assert twice.rounds[0].long is not None
    assert twice.rounds[0].long.tolist() == [80.0, 80.0]
    wide = {"gpus_per_node": 4, "local": {"rate": 100.0, "domain": 4, "ipc": 50.0}}
    assert seconds({**plain, **wide}, twice, "ipc", relay) == pytest.approx(1.0 + LONG / 100)


def test_a_long_range_is_contiguous_on_both_sides_and_as_long_as_cuda_ipc_wants_it() -> None:
    assert LONG == COPY_FROM
    cut, whole = predict_nvlink.work("scatter", 1), predict_nvlink.work("same", 1)
    trainer, rollout = gpu_p2p.specs(1, "scatter")
    plan = make_plan(layout_of(trainer, "trainer"), layout_of(rollout, "rollout"))
    schedule = make_schedule(plan, gpu_p2p.COSTS["ours"])
    one = plan.shape.prod(axis=1) == inner_elements(plan.shape, plan.source_strides, plan.target_strides)
    by_hand = sum(n for n, whole_run in zip(plan.nbytes.tolist(), one.tolist(), strict=True) if whole_run and n >= COPY_FROM)
    assert sum(r.long.sum() for r in cut.rounds if r.long is not None) == by_hand
    assert 0.5 < by_hand / cut.nbytes < 0.9, "not down projections, which are strided"
    assert sum(r.long.sum() for r in whole.rounds if r.long is not None) / whole.nbytes > 0.99
    assert all((r.long == 0).all() for r in work_of(schedule, bucket=COPY_FROM - 1).rounds if r.long is not None)


@pytest.mark.parametrize("run", predict_nvlink.RECORDED)
def test_whole_syncs_recorded_between_two_gpus_are_predicted_within_fifteen_percent(run: str) -> None:
    assert abs(predict_nvlink.recorded_error(run)) <= 0.15


def test_a_run_of_small_tensors_gives_back_the_seconds_it_was_made_with() -> None:
    cluster, many = load_cluster("h200"), predict_nvlink.work("tiny", 2)
    said = predict_nvlink.session(many, cluster)
    phases = dict(said.phases) | {"write on ranks": said.phases["write"] - predict_nvlink.CALLS.round}
    found = predict_nvlink.from_tiny(cluster, many, phases).python
    assert found.check == pytest.approx(cluster.python.check, rel=0.02)
    assert found.receive == pytest.approx(cluster.python.receive, rel=0.02)
    assert found.send == pytest.approx(cluster.python.send, rel=0.05)
