"""Real vLLM servers, Mooncake, trainer ranks and a controller, killed and stopped by benchmarks/drills.py.

The tests share one job and run in file order; each leaves every engine serving one version. What an engine holds is read out of
its workers' memory by the kernel. The whole matrix and the long run are in docs/drills.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.drill_job import PROMPT, Job
from benchmarks.drill_model import FEW
from benchmarks.drill_soak import soak
from benchmarks.drills import Matrix

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job("vllm", tmp_path_factory.mktemp("drills"), engines=2, members=1) as running:
        yield running


@pytest.fixture(scope="module")
def drill(job: Job) -> Matrix:
    return Matrix(job, stopped=5.0)


def test_an_engine_that_joins_reads_its_weights_out_of_the_live_memory_of_one_that_serves(job: Job, drill: Matrix) -> None:
    drill.version = 1
    job.step(1)
    assert job.ask("sync", version=1)["ok"]
    job.step(2)  # the trainer is further already: what comes must be the other engine's
    assert job.wrong("e1", 1)

    reply = job.ask("join", engine=job.servers["e1"].about, pull=True)

    assert (reply["ok"], reply["error"], reply["replicas"]) == (True, "", {"e0": "ready 1", "e1": "ready 1"})
    assert job.wrong("e0", 1) == job.wrong("e1", 1) == []
    assert [job.stands(name)["version"] for name in ("e0", "e1")] == [1, 1]
    answers = [e.adapter.generate(PROMPT, 8, e.soon()) for e in job.servers.values()]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("level", ["full", "check_weight_equal"])
def test_every_level_of_verification_works_on_live_engines(job: Job, drill: Matrix, level: str) -> None:
    assert job.ask("level", level=level)["ok"]
    reply = drill.next()
    assert (reply["ok"], reply["error"]) == (True, "")
    assert drill.all_serve(drill.version) == []
    assert job.ask("level", level="digest")["ok"]


def test_check_weight_equal_passes_on_equal_weights_and_fails_on_others(job: Job, drill: Matrix) -> None:
    assert job.ask("check", version=drill.version + 1)["ok"]
    drill.version += 1
    held = drill.version - 1  # the check is a sync of what was there
    assert [job.wrong(name, held) for name in ("e0", "e1")] == [[], []]

    job.step(1000)
    reply = job.ask("check", version=drill.version + 1)

    assert not reply["ok"]
    assert reply["error"].startswith("VerifyError")
    assert reply["version"] == drill.version
    assert [job.stands(name)["paused"] for name in ("e0", "e1")] == [True, True]
    assert drill.next()["ok"]
    assert drill.all_serve(drill.version) == []


def test_deltas_reach_the_live_memory_of_real_engines_and_only_they_travel(job: Job, drill: Matrix) -> None:
    assert job.ask("delta", on=True)["ok"]
    whole = drill.next()
    assert (whole["ok"], whole["error"], whole["complete"]) == (True, "", "first")
    step = drill.version
    for few in (1, 2):
        job.step(step + few * FEW)
        drill.version += 1
        reply = job.ask("sync", version=drill.version)
        assert (reply["ok"], reply["error"], reply["complete"]) == (True, "", None)
        assert 0 < reply["bytes"] < whole["bytes"] / 20
        assert [job.wrong(name, step + few * FEW) for name in ("e0", "e1")] == [[], []]
        assert [job.stands(name)["version"] for name in ("e0", "e1")] == [drill.version] * 2
    assert job.wrong("e0", step)
    assert job.ask("delta", on=False)["ok"]
    assert drill.next()["ok"]
    assert drill.all_serve(drill.version) == []


@pytest.mark.parametrize(
    "cell",
    [
        ("trainer", "KILL", "write"),
        ("worker", "KILL", "write"),
        ("controller", "KILL", "resume"),
        ("controller", "STOP", "commit"),
    ],
    ids=" ".join,
)
def test_whoever_is_killed_or_stopped_nothing_wrong_is_served_and_the_next_sync_recovers(
    drill: Matrix, cell: tuple[str, str, str]
) -> None:
    victim, signal, phase = cell
    row = drill.cell(victim, signal, phase)
    assert row.wrong == []
    assert row.tries == 1
    # All of these come between the first byte and the first resume.
    assert [how for how in row.engines.values() if how != "gone" and not how.startswith("paused")] == []
    if victim == "controller":
        assert row.healed.startswith("recover: resumed" if phase == "resume" else "recover: redo")
    else:
        assert row.error


def test_engines_join_and_leave_between_syncs_and_every_byte_is_right_each_time(job: Job, drill: Matrix) -> None:
    result = soak(job, 6, drill.version)
    assert result.wrong == []
    assert (result.joins, result.pulled, result.leaves) == (2, 1, 2)
    assert result.digests == 6
