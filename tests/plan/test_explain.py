"""What a plan says of itself, held against the plan."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from layout_cases import jobs, rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes
from plan_support import scattered

from weight_sync.errors import PlanError
from weight_sync.plan.explain import explain_rank, explain_tensor, summary
from weight_sync.plan.planner import make_plan
from weight_sync.plan.runs import expand_runs

relaxed = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
SIZES = Sizes(layers=2, hidden=4, heads=4, kv_heads=2, head_dim=2, ffn=4, vocab=70)
SOURCE = trainer_layout(SIZES, Mcore(4, tp=2), 36)
TARGET = rollout_layout(SIZES, Engine(tp=2, engines=2))
HOSTS = (["a", "a", "b", "b"], ["b", "b", "c", "c"])
PLAN = make_plan(SOURCE, TARGET, *HOSTS)


def test_every_transfer_of_a_tensor_is_one_line_with_box_ranks_parameters_and_bytes():
    text = explain_tensor(PLAN, "model.layers.1.mlp.down_proj.weight", SOURCE)
    head, *lines = text.split("\n")
    assert head == "model.layers.1.mlp.down_proj.weight [4, 4] bfloat16: 4 transfers, 64 B"
    assert len(lines) == 4
    for line in lines:
        found = re.fullmatch(
            r"  \[0:4, (0:2|2:4)\]: trainer rank (\d) \((\w)\) decoder\.layers\.1\.mlp\.linear_fc2\.weight -> "
            r"rollout rank (\d) \((\w)\) model\.layers\.1\.mlp\.down_proj\.weight; 16 B, contiguous; (.*)",
            line,
        )
        assert found, line
        assert HOSTS[0][int(found[2])] == found[3]
        assert HOSTS[1][int(found[4])] == found[5]
        assert int(found[2]) % 2 == int(found[4]) % 2 == (found[1] == "2:4")


def test_strided_transfers_say_how_many_runs_of_how_many_bytes():
    target = rollout_layout(SIZES, Engine())
    text = explain_tensor(make_plan(SOURCE, target), "model.layers.0.mlp.down_proj.weight")
    assert text.count("16 B, strided, 4 runs x 4 B") == 2


def test_the_reason_is_the_host_or_the_bytes_or_that_nobody_else_holds_it():
    near = explain_tensor(PLAN, "model.layers.0.mlp.down_proj.weight", SOURCE)
    assert "of ranks 0, 2 the only one on the same host, b" in near
    assert "of ranks 1, 3 the only one on the same host, b" in near
    assert re.search(r"fewest bytes when it was chosen, of ranks 0, 2 \(in the end 0: .* B, 2: .* B\)", near)
    norm = explain_tensor(PLAN, "model.norm.weight", SOURCE)
    assert "of ranks 2, 3 on the same host, b" in norm
    alone = make_plan(trainer_layout(SIZES, Mcore(2, tp=2), 36), TARGET, ["a", "b"], HOSTS[1])
    text = explain_tensor(alone, "model.layers.0.mlp.down_proj.weight", trainer_layout(SIZES, Mcore(2, tp=2), 36))
    assert "the only holder, on the same host, b" in text
    assert text.count("the only holder") == 4


def test_without_the_layout_only_what_the_plan_knows_is_said():
    text = explain_tensor(PLAN, "model.layers.0.mlp.down_proj.weight")
    assert "source on the same host, b" in text
    assert "source chosen among the ranks that hold it" in text
    assert "only holder" not in text


@relaxed
@given(scattered())
def test_the_named_holders_always_include_the_source(case):
    _, source, target = case
    plan = make_plan(source, target)
    for name in plan.catalog.ids:
        head, *lines = explain_tensor(plan, name, source).split("\n")
        assert f"{len(lines)} transfer" in head or (not lines and "0 transfers" in head)
        for line in lines:
            rank = int(re.search(r"trainer rank (\d+)", line)[1])
            among = re.search(r"of ranks ([\d, ]+)", line)
            assert ("the only holder" in line) != (among is not None)
            if among:
                assert str(rank) in among[1].strip().split(", ")


def test_an_unknown_tensor_names_close_ones_and_another_layout_is_refused():
    with pytest.raises(PlanError) as caught:
        explain_tensor(PLAN, "layers.0.mlp.down_proj.weight")
    assert "model.layers.0.mlp.down_proj.weight" in str(caught.value)
    with pytest.raises(PlanError, match="not the one this plan was made from"):
        explain_tensor(PLAN, "model.norm.weight", trainer_layout(SIZES, Mcore(2, tp=2), 36))


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_a_ranks_totals_peers_and_parameters_are_those_of_the_plan(side):
    for rank in range(4):
        head, *lines = explain_rank(PLAN, side, rank).split("\n")
        rows = PLAN.rows_from(rank) if side == "trainer" else PLAN.rows_to(rank)
        assert f"{side} rank {rank} ({HOSTS[side == 'rollout'][rank]})" in head
        assert f"{len(rows)} transfers" in head
        peers = (PLAN.target_rank if side == "trainer" else PLAN.source_rank)[rows]
        said = {int(m[1]): int(m[2]) for line in lines if (m := re.search(r"rank (\d+): .* in (\d+) transfer", line))}
        assert said == dict(zip(*(x.tolist() for x in np.unique(peers, return_counts=True)), strict=True))
        params = SOURCE.rank_params(rank) if side == "trainer" else TARGET.rank_params(rank)
        named = {line.split()[0] for line in lines if "rank" not in line}
        assert named == {
            params[i - _first(side, rank)].name for i in set((PLAN.source if side == "trainer" else PLAN.target)[rows])
        }


def _first(side: str, rank: int) -> int:
    layout = SOURCE if side == "trainer" else TARGET
    return sum(len(layout.rank_params(r)) for r in range(rank))


def test_a_rank_or_side_that_does_not_exist_is_refused():
    with pytest.raises(PlanError, match="rollout rank 4 is outside the world of 4"):
        explain_rank(PLAN, "rollout", 4)
    with pytest.raises(ValueError, match="engine"):
        explain_rank(PLAN, "engine", 0)


@relaxed
@given(jobs())
def test_the_summary_counts_what_the_plan_holds(job):
    sizes, trainer, rollout, multiple = job
    plan = make_plan(trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout))
    numbers = summary(plan)
    sent = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=trainer.ranks)
    assert numbers["transfers"] == len(plan)
    assert numbers["bytes"] == plan.nbytes.sum() == sent.sum()
    assert numbers["source_bytes"] == {"max": sent.max(), "mean": sent.mean(), "skew": pytest.approx(sent.max() / sent.mean())}
    assert numbers["sources"] == (sent > 0).sum()
    assert numbers["same_host_bytes"] == 0
    runs = expand_runs(plan.shape, plan.source_start, plan.source_strides, plan.target_start, plan.target_strides)
    assert numbers["runs"] == len(runs[0])


def test_bytes_between_ranks_of_one_host_are_counted():
    near = sum(
        int(n) for n, a, b in zip(PLAN.nbytes, PLAN.source_rank, PLAN.target_rank, strict=True) if HOSTS[0][a] == HOSTS[1][b]
    )
    assert summary(PLAN)["same_host_bytes"] == near > 0
