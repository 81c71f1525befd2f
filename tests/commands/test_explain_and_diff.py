"""`explain` and `diff` say what the plan holds: every number in them is counted anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands_support import Said

from weight_sync.commands.common import job_of
from weight_sync.commands.explain import explained
from weight_sync.errors import PlanError, WeightSyncError
from weight_sync.plan.difference import difference
from weight_sync.plan.explain import explain_rows
from weight_sync.plan.figures import per_rank
from weight_sync.plan.picture import bars, numbers_text, tensor_picture
from weight_sync.plan.schedule import CostModel, Method, Schedule, make_schedule
from weight_sync.session.inputs import layout_of

O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([2, 0, 1], "0-2"),
        ([0, 1, 4, 6, 7], "0-1, 4, 6-7"),
        ([0, 8, 16, 24], "0, 8, ... 24"),
        ([1, 1], "1"),
    ],
)
def test_ranks_are_written_shortly(numbers: list[int], text: str) -> None:
    assert numbers_text(numbers) == text


def test_bars_are_to_scale_and_say_how_many_are_left_out() -> None:
    lines = bars([("a", 100, "x"), ("bb", 50, "y"), ("c", 1, "z")], width=10, limit=2)
    assert [line.count("█") for line in lines] == [10, 5, 0]
    assert lines[2] == "  ... and 1 more"


def test_the_picture_of_a_tensor_shows_who_holds_and_who_gets_each_part(job: tuple[str, ...]) -> None:
    found = job_of(job)
    source = layout_of(found.trainer, "trainer")
    plan = found.inputs.schedule().plan
    lines = tensor_picture(plan, plan.catalog.ids[O_PROJ], source)

    # trainer TP2 on the first of two stages (dp2): ranks 0, 2 and 1, 3; engines of attention TP4
    assert lines[0] == "  dim 1, 128 elements:"
    assert "|0, 2" in lines[1]
    assert "|1, 3" in lines[1]
    for pair in ("|0, 4", "|1, 5", "|2, 6", "|3, 7"):
        assert pair in lines[2]
    assert lines[1].index("|1, 3") == lines[2].index("|2, 6"), "the middle of the tensor is below itself"
    norm = tensor_picture(plan, plan.catalog.ids["model.norm.weight"], source)
    assert norm == [], "a tensor that nobody cuts needs no picture"


def test_a_tensor_is_explained_with_picture_transfers_and_methods(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    said = call("explain", O_PROJ, *job, "rows=3")
    assert said.code == 0
    assert said.out.startswith(f"{O_PROJ} [128, 128] bfloat16: 8 transfers")
    assert "... and 5 more lines (rows=8)" in said.out
    assert any(line.startswith(("direct: ", "pack: ")) for line in said.out.splitlines())


FP8 = ("weight_sync.quant.scheme=fp8_block", "+weight_sync.quant.options.group=[32,32]")
"""What the small job is quantised with."""


def test_a_quantised_weight_and_its_scales_say_what_they_are_made_of_and_who_holds_it(
    call: Callable[..., Said], job: tuple[str, ...]
) -> None:
    values = call("explain", O_PROJ, *job, *FP8, "rows=100")
    assert values.out.startswith(f"{O_PROJ} [128, 128] float8_e4m3fn (values made of the bfloat16 weight): 8 transfers")
    scales = call("explain", f"{O_PROJ}_scale_inv", *job, *FP8, "rows=100")
    assert scales.code == 0, scales.err
    assert scales.out.startswith(f"{O_PROJ}_scale_inv [4, 4] float32 (scales made of {O_PROJ}, the bfloat16 weight): 8 tran")

    def holders(text: str) -> list[str]:
        return sorted(line.partition("of ranks ")[2].partition(" (")[0] for line in text.splitlines() if "of ranks" in line)

    assert holders(scales.out) == holders(values.out) == ["0, 2"] * 4 + ["1, 3"] * 4
    rulers = [[line.strip() for line in said.out.splitlines()[2:4]] for said in (values, scales)]
    assert rulers[0] == rulers[1], "scales are cut where their weight is"


def test_a_tensor_that_nobody_cuts_says_where_it_is_whole(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    out = call("explain", "model.norm.weight", *job).out.splitlines()
    assert out[1:3] == ["  whole on trainer ranks 4-7", "  whole on rollout ranks 0-7"]


def test_many_holders_are_a_range_with_the_least_and_the_most_they_send(
    call: Callable[..., Said], job: tuple[str, ...]
) -> None:
    same = [word for word in job if not word.startswith(("trainer.", "plan."))]
    out = call("explain", "model.norm.weight", *same, "trainer.ranks=16", "trainer.tp=2", "trainer.pp=1", "trainer.ep=2").out
    assert "of ranks 0-15 (in the end " in out


def test_the_runs_of_all_ranks_are_those_that_the_plan_counts(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    for words in ((), FP8):
        heads = [call("explain", f"rollout:{rank}", *job, *words).out.splitlines()[0] for rank in range(8)]
        runs = sum(int(head.rpartition(", ")[2].split()[0]) for head in heads)
        assert runs == call("plan", *job, *words, "output=json").json["runs"]


def test_a_link_brings_together_what_goes_over_it(schedule: Schedule) -> None:
    plan = schedule.plan
    seen = 0
    for a in range(plan.source_world):
        for b in range(plan.target_world):
            rows = np.flatnonzero((plan.source_rank == a) & (plan.target_rank == b))
            text = explained(schedule, f"trainer:{a}-rollout:{b}", None, None, 5)
            assert text.split("\n")[0].startswith(f"trainer:{a}-rollout:{b}: ")
            assert f"in {len(rows)} transfer" in text.split("\n")[0]
            seen += len(rows)
    assert seen == len(plan)
    between = explained(schedule, "node0-node1", None, None, 5)
    assert f"in {len(plan)} transfers" in between, "all trainer ranks are on node0, all rollout ranks on node1"


def test_the_cards_of_a_cluster_carry_every_byte_between_nodes_once(schedule: Schedule) -> None:
    plan = schedule.plan
    for way, node in (("out", 0), ("in", 1)):
        heads = [explained(schedule, f"node {node} nic {k} {way}", None, "h100_400g", 0).split("\n")[0] for k in range(8)]
        assert sum(int(head.partition(" in ")[2].split()[0]) for head in heads) == len(plan)


def test_a_rank_is_explained_by_peer_and_by_tensor(call: Callable[..., Said], job: tuple[str, ...]) -> None:
    said = call("explain", "rollout:3", *job, "rows=100")
    assert said.code == 0
    assert "rollout rank 3 (node1): " in said.out
    assert "-> rollout 3 " in said.out
    assert "model.layers.{l}.mlp.experts.{e}.up_proj.weight" in said.out


def test_kinds_of_tensors_add_up(schedule: Schedule) -> None:
    text = explain_rows(schedule.plan, np.arange(len(schedule.plan)), "all")
    counts = [int(line.split(" of ")[-1].split()[0]) for line in text.split("by tensor:")[1].splitlines() if " of " in line]
    assert sum(counts) == len(schedule.plan.catalog)


@pytest.mark.parametrize(
    ("what", "cluster", "said"),
    [
        ("model.nosuch.weight", None, "no tensor model.nosuch.weight in this plan"),
        ("trainer:8", None, "trainer rank 8 is outside the world of 8"),
        ("trainer:x", None, "no tensor trainer:x in this plan"),
        ("trainer:0-rollout:8", None, "rollout rank 8 is outside the world of 8"),
        ("node0-node9", None, "no such hosts; there are node0, node1"),
        ("node 0 nic 0 out", None, "say which, cluster=NAME"),
        ("node 9 nic 0 out", "h100_400g", "no rank uses card 0 of node 9; there are nodes 0 to 1"),
    ],
)
def test_what_cannot_be_explained_is_refused(schedule: Schedule, what: str, cluster: str | None, said: str) -> None:
    with pytest.raises(WeightSyncError, match=said):
        explained(schedule, what, None, cluster, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "explain what?"),
        (("trainer.tp=2",), "explain what?"),
        ((O_PROJ, "rows=x"), "rows=x: must be a number"),
        ((O_PROJ, "transport=rdma"), "transport=rdma: belongs to plan=FILE"),
    ],
)
def test_words_that_explain_nothing_are_refused(call: Callable[..., Said], words: tuple[str, ...], said: str) -> None:
    result = call("explain", *words)
    assert (result.code, result.out) == (1, "")
    assert said in result.err


# -- difference ----------------------------------------------------------------------------------------------------------


def test_a_plan_does_not_differ_from_itself(schedule: Schedule, call: Callable[..., Said], job: tuple[str, ...]) -> None:
    found = difference(schedule, schedule)
    assert found.same
    assert (found.numbers, found.moved, found.recut, found.remethod, found.only_a, found.only_b) == ({}, 0, {}, {}, {}, {})
    assert (found.trainer, found.rollout) == ({}, {})
    assert found.common == int(schedule.plan.nbytes.sum())
    assert call("diff", *job, "--", "--").out.startswith("the two plans are the same: ")


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.tp=4", "trainer.ep=4"],
        ["rollout.moe_ep=4"],
        ["rollout.engines=3"],
        ["trainer.ranks=4", "trainer.pp=1"],
        ["plan.gpus_per_node=4"],
        ["weight_sync.costs.seconds_per_write=0"],
    ],
    ids=" ".join,
)
def test_a_difference_accounts_for_every_byte_of_both_plans(
    job: tuple[str, ...], schedule: Schedule, changes: list[str]
) -> None:
    other = job_of([*job, *changes]).inputs.schedule()
    found = difference(schedule, other)
    back = difference(other, schedule)

    recut = sum(found.recut.values())
    assert found.common + recut + sum(found.only_a.values()) == int(schedule.plan.nbytes.sum())
    assert found.common + recut + sum(found.only_b.values()) == int(other.plan.nbytes.sum())
    assert (back.common, back.moved, back.recut) == (found.common, found.moved, found.recut)
    assert (back.only_a, back.only_b) == (found.only_b, found.only_a)
    for side, change in (("source", found.trainer), ("target", found.rollout)):
        world = max(getattr(schedule.plan, f"{side}_world"), getattr(other.plan, f"{side}_world"))
        old, new = (per_rank(s.plan.nbytes, getattr(s.plan, f"{side}_rank"), world) for s in (schedule, other))
        assert {rank: int(new[rank] - old[rank]) for rank in range(world) if new[rank] != old[rank]} == change
    for name, (a, b) in found.numbers.items():
        assert a != b, name


def test_a_sender_that_changed_and_a_method_that_changed_are_named(schedule: Schedule, job: tuple[str, ...]) -> None:
    apart = job_of([*job, "plan.gpus_per_node=4"]).inputs.schedule()
    moved = difference(schedule, apart)
    by_hand = 0
    senders: dict[Any, int] = {}
    for plan, note in ((schedule.plan, True), (apart.plan, False)):
        for i in range(len(plan)):
            key = (int(plan.tensor[i]), *plan.offset[i].tolist(), *plan.shape[i].tolist(), int(plan.target_rank[i]))
            if note:
                senders[key] = int(plan.source_rank[i])
            elif senders.get(key, -1) not in (-1, int(plan.source_rank[i])):
                by_hand += int(plan.nbytes[i])
    assert moved.moved == by_hand

    dear = make_schedule(schedule.plan, CostModel(seconds_per_write=0.0))
    found = difference(dear, schedule)
    assert found.common == int(schedule.plan.nbytes.sum())
    changed = {
        schedule.plan.catalog.pattern_of(t).template for t in schedule.plan.tensor[schedule.method != dear.method].tolist()
    }
    assert changed
    assert set(found.remethod) == changed
    assert all(set(new) - {"direct"} for _, new in found.remethod.values())
    assert Method.DIRECT in schedule.method


def test_plans_that_differ_in_what_is_quantised_are_compared_and_account_for_every_byte(
    job: tuple[str, ...], schedule: Schedule
) -> None:
    other = job_of([*job, *FP8]).inputs.schedule()
    found = difference(schedule, other)
    recut = sum(found.recut.values())
    assert found.common + recut + sum(found.only_a.values()) == int(schedule.plan.nbytes.sum())
    assert found.common + recut + sum(found.only_b.values()) == int(other.plan.nbytes.sum())
    kept = sum(int(n) for n, made in zip(other.plan.nbytes, other.plan.made, strict=True) if not made)
    assert found.common == kept, "what is not quantised goes to the same places"
    assert set(found.only_b) == {name for name in found.only_b if name.endswith("weight_scale_inv")}
    assert {old for old, _ in found.remethod.values() for old in old} <= {"direct", "pack", "unpack", "both"}
    back = difference(other, schedule)
    assert (back.common, back.recut, back.only_a, back.only_b) == (found.common, found.recut, found.only_b, found.only_a)


def test_saved_plans_are_compared_and_other_models_refused(
    call: Callable[..., Said], job: tuple[str, ...], tmp_path: Path
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json.gz"
    call("plan", *job, f"save={a}")
    call("plan", *job, "rollout.moe_ep=4", f"save={b}")
    said = call("diff", str(a), str(b))
    assert said.code == 0
    assert "in both plans, but in other boxes, to other places or in another dtype" in said.out
    assert call("diff", str(a), str(b), "output=json").json["same"] is False
    assert call("explain", "trainer:1", f"plan={a}").out.startswith("trainer rank 1 (node0): ")
    card = ("explain", "node 1 nic 0 in", f"plan={a}", "cluster=h100_400g")
    assert call(*card).out == call(*card, "transport=rdma").out, "all bytes come from another node"
    with pytest.raises(PlanError, match="different models"):
        difference(job_of(job).inputs.schedule(), job_of(["model.config=qwen3_4b"]).inputs.schedule())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.json",), "two saved plans, or overrides in three groups"),
        (("x", "--", "y"), "in three groups, common -- of A -- of B; got 2"),
        (("nosuch.json", "nosuch2.json"), "no saved plan"),
    ],
)
def test_a_difference_of_anything_else_is_refused(call: Callable[..., Said], words: tuple[str, ...], said: str) -> None:
    result = call("diff", *words)
    assert (result.code, result.out) == (1, "")
    assert said in result.err
