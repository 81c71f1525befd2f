"""Seeded drills of the real session: nothing wrong is served, nothing hangs, everything recovers. `chaos seeds=N` runs more."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from weight_sync.chaos import drill
from weight_sync.chaos.case import CASES
from weight_sync.chaos.clock import Clock, virtual
from weight_sync.chaos.faults import FAULTS
from weight_sync.chaos.job import Job
from weight_sync.cli import main
from weight_sync.errors import ConfigError

SEEDS = 300
REGRESSIONS = {
    "a reply to an earlier write taken for this one's": ("message stale digests", 133),
    "memory that moves between verify and finish": ("engine memory moved", 1778),
    "a quiesce that comes after its session has ended holds the trainer": ("message late request", 2059),
    "a quiesce that comes twice lets the trainer step in between": ("message doubled request", 161),
}
"""What drills found in the session, with the fault that showed it and a seed at which it did."""


def test_no_drill_ends_in_wrong_bytes_served_or_in_a_hang() -> None:
    summary, bad = drill.many(range(SEEDS))
    assert not bad, [(one.seed, one.faults, one.wrong + one.hung) for one in bad]
    assert (summary.runs, summary.silent_wrong, summary.hangs) == (SEEDS, 0, 0)
    assert summary.committed + summary.failed == SEEDS
    assert min(summary.committed, summary.failed) > SEEDS // 10, "drills that always, or never, succeed show little"
    assert set(FAULTS) == set(summary.by_fault) - {"none"}, "faults that never struck"


@pytest.mark.parametrize(("fault", "seed"), REGRESSIONS.values(), ids=REGRESSIONS)
def test_what_drills_once_found_stays_mended(fault: str, seed: int) -> None:
    for one in (drill.run(seed), drill.run(seed, faults=(fault,))):
        assert not one.wrong + one.hung


def test_a_run_is_a_function_of_its_seed() -> None:
    def told(seed: int) -> tuple[Any, list[str]]:
        story: list[str] = []
        return drill.run(seed, story=story), [line.split("  ")[-1][:60] for line in story if "-> " in line or "**" in line]

    seeds = [3, 14, 40]
    once = [told(seed) for seed in seeds]
    assert [told(seed) for seed in reversed(seeds)] == once[::-1]
    assert any("**" in line for _, story in once for line in story)


def test_without_faults_every_sync_commits() -> None:
    summary, bad = drill.many(range(12), faults=())
    assert (summary.committed, summary.failed, bad) == (12, 0, [])


def test_no_drill_with_deltas_ends_in_wrong_bytes_served_or_in_a_hang() -> None:
    runs = [drill.run(seed, deltas=True) for seed in range(45)]
    assert not [(one.seed, one.faults, one.wrong + one.hung) for one in runs if one.wrong + one.hung]
    assert sum(one.deltas for one in runs) > 45, "drills in which nearly every sync is complete show little"
    assert sum(one.failed for one in runs) > 45
    calm = [drill.run(seed, deltas=True, faults=()) for seed in range(4)]
    assert all(one.deltas >= one.committed - 1 and not one.failed for one in calm)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_expected_bytes_are_not_what_the_engine_had_before(case: Any) -> None:
    """A drill whose wanted and stale bytes were alike could not see that an engine is stale."""
    job = Job(case, 7)
    for engine in job.engines:
        assert job._faults(engine) is None
        for worker in engine.workers:
            assert worker.wrong(job.values(1)) is not None


def test_one_wrong_byte_anywhere_in_a_serving_engine_is_seen() -> None:
    job = Job(CASES[0], 7)
    worker = job.workers[0]
    for at in np.random.default_rng(0).integers(0, len(worker.block.bytes), 60).tolist():
        worker.block.bytes[at] ^= 1
        job.wrong.clear()
        job.check()
        assert job.wrong, f"byte {at}"
        worker.block.bytes[at] ^= 1
    for name, value in worker.derived.items():
        value.flat[0] ^= 1
        job.wrong.clear()
        job.check()
        assert job.wrong, name
        value.flat[0] ^= 1


def test_the_virtual_clock_passes_only_when_something_waits_and_is_gone_afterwards() -> None:
    import random
    import time

    from weight_sync import ids

    clock = Clock()
    with virtual(clock, random.Random(0)):
        deadline = ids.Deadline.after(1000)
        clock.offset -= 1e9  # the wall clock may say what it likes
        assert deadline.remaining() == pytest.approx(1000, abs=1e-3)
        clock.sleep(2000)
        assert deadline.remaining() == 0
    assert ids.time is time


def test_the_command_prints_the_summary_as_json_and_tells_the_story_of_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "seeds=6", "first=3", "output=json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == ["runs", "silent_wrong", "hangs", "committed", "failed", "by_fault"]
    assert summary["runs"] == 6
    assert main(["chaos", "seed=3"]) == 0
    assert "controller 0 -> engine e0: resume" in capsys.readouterr().out
    assert main(["chaos", "seeds=2", "fault=write drop"]) == 0
    assert "write drop" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["seeds=0", "seeds=x", "fault=rain", "speed=9"])
def test_the_command_refuses_words_it_does_not_know(word: str) -> None:
    from weight_sync.commands.chaos import run

    with pytest.raises(ConfigError):
        run([word])
