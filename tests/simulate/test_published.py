"""Published measurements against the simulator: who is faster in each row, the order of rows, and the NVLink runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import predict_miles
import predict_nvlink

from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.simulate import load_cluster
from weight_sync.simulate.strategies import Gathered, broadcast, locked_seconds, replica


@pytest.fixture(scope="module")
def both() -> tuple[np.ndarray, np.ndarray]:
    """(published, simulated) [rows, 2]: seconds of replica and broadcast."""
    rows = predict_miles.ROWS
    known = {row.name: predict_miles.facts(row) for row in rows}
    return predict_miles.published(rows), predict_miles.simulated(rows, known, load_cluster("h100_400g"))


def test_the_faster_strategy_of_every_published_row_is_the_faster_one_here(both: tuple[np.ndarray, np.ndarray]) -> None:
    true, said = both
    assert ((true[:, 0] < true[:, 1]) == (said[:, 0] < said[:, 1])).all()


def test_rows_come_in_the_published_order_where_the_published_ones_differ_by_a_quarter(
    both: tuple[np.ndarray, np.ndarray],
) -> None:
    true, said = both
    for t, s in ((true[:, 0], said[:, 0]), (true[:, 1], said[:, 1]), (true[:, 1] / true[:, 0], said[:, 1] / said[:, 0])):
        for i in range(len(t)):
            for j in range(len(t)):
                if t[i] > 1.25 * t[j]:
                    assert s[i] > s[j], (predict_miles.ROWS[i].name, predict_miles.ROWS[j].name)


def test_the_error_is_what_the_page_says(both: tuple[np.ndarray, np.ndarray]) -> None:
    true, said = both
    error = np.abs(said / true - 1)
    assert error.max() < 0.31
    assert error.mean() < 0.13


@pytest.mark.parametrize("threads", predict_nvlink.MEASURED)
def test_writes_measured_over_nvlink_are_predicted_within_five_percent(threads: int) -> None:
    low, high = predict_nvlink.MEASURED[threads]
    assert low * 0.95 <= predict_nvlink.predicted(threads) <= high * 1.05


def test_one_stage_never_waits_for_the_lock_and_two_wait_for_a_poll_at_most_each_time() -> None:
    assert locked_seconds([10], [0.01], [0.02], 0.1) == pytest.approx(0.3)
    two = locked_seconds([10, 10], [0.01, 0.01], [0.02, 0.02], 0.1)
    assert 0.4 <= two <= 0.4 + 20 * 0.1


def test_more_engines_cost_a_broadcast_calls_and_a_replica_nothing_until_the_wire_is_full() -> None:
    cluster = load_cluster("h100_400g")

    def facts(engines: int) -> Gathered:
        trainer, rollout = TrainerDims(8, tp=8), EngineDims(tp=8, engines=engines)
        served = np.array([[0, 1e9, 0.0, engines * 1e9]])
        return Gathered(trainer, rollout, np.array([8e9]), np.array([100]), served)

    assert broadcast(facts(8), cluster).seconds > broadcast(facts(1), cluster).seconds
    assert replica(facts(8), cluster).seconds == pytest.approx(replica(facts(1), cluster).seconds)
    assert replica(facts(800), cluster).seconds > 2 * replica(facts(1), cluster).seconds
