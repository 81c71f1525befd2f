"""Weights besides the weights, as SglangEngine and its workers enforce it, against the server of test_engine.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine import Engine, engine, soon

from weight_sync.errors import BindError, SessionError, VerifyError
from weight_sync.session.connect import SyncSpec, connect
from weight_sync.session.contracts import Receipt
from weight_sync.session.inputs import Declared

__all__ = ["engine"]  # a fixture


class DeepseekV2AttentionMLA(torch.nn.Module):
    """Stands for SGLang's class of this name: the engine's table speaks of its w_kc."""

    def __init__(self) -> None:
        super().__init__()
        self.w_kc = torch.ones(3)


def models(engine: Engine) -> list[Any]:
    return [scheduler.tp_worker.model_runner.model for scheduler in engine.schedulers]


def test_a_tensor_that_nothing_keeps_right_is_refused_at_bind_and_nothing_is_paused(engine: Engine) -> None:
    models(engine)[1].odd = torch.ones(2)

    with pytest.raises(BindError, match=r"rollout rank 1: 1 tensors would not be kept right, odd \(attribute of Module\)"):
        engine.bind("p")

    assert engine.log == []
    entries = engine.adapter.inventory(None, soon())
    assert {e["name"]: e["keep"] for e in entries[0]} == {"a": "synced", "b": "synced"}
    assert {e["name"]: e["keep"] for e in entries[1]} == {"a": "synced", "b": "synced", "odd": None}
    assert {e["name"]: e["keep"] for e in engine.adapter.inventory({0: ["a"], 1: ["a"]}, soon())[0]} == {
        "a": "synced",
        "b": None,
    }


def test_a_plan_of_another_layout_is_told_by_its_own_names(engine: Engine) -> None:
    with pytest.raises(BindError, match=r"declared layout is not the live one: c: planned \[\[7\], 'float32'\], live absent"):
        engine.bind("p", expected={"c": [[7], "float32"]})
    assert engine.log == []


def test_derived_tensors_are_spoilt_before_post_processing_and_proven_before_cache_version_and_commit(engine: Engine) -> None:
    for model in models(engine):
        model.attention = DeepseekV2AttentionMLA()
    engine.derive = lambda model: model.attention.w_kc.fill_(5)  # as the model's post_load_weights would

    engine.until_verified("s1")
    engine.adapter.finish("s1", 7, "d", soon())

    assert [float(model.attention.w_kc.sum()) for model in models(engine)] == [15, 15]


def test_a_derived_tensor_that_stays_stale_commits_nothing_flushes_nothing_and_leaves_the_engine_paused(engine: Engine) -> None:
    for model in models(engine):
        model.attention = DeepseekV2AttentionMLA()
    engine.until_verified("s1")

    with pytest.raises(VerifyError, match=r"rollout rank 0: attention\.w_kc was not recomputed from the new weights"):
        engine.adapter.finish("s1", 7, "d", soon())

    assert engine.log[-1] == "/end_weight_update"
    assert engine.version == "default"
    assert all(state["paused"] and state["suspect"] for state in engine.adapter.state(soon()).values())
    with pytest.raises(SessionError, match="suspect weights"):
        engine.adapter.resume(Receipt("e0", "s1", 7, "d"), soon())


def test_a_server_that_cannot_recompute_derived_tensors_is_refused_at_bind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(monkeypatch, tmp_path, session_routes=False)
    try:
        models(engine)[0].attention = DeepseekV2AttentionMLA()
        with pytest.raises(BindError, match=r"w_kc .*derived from weights, and this server has no call that recomputes it"):
            engine.bind("p")
    finally:
        engine.close()


@pytest.mark.parametrize(("policy", "touch"), [("refuse", False), ("frozen", False), ("frozen", True)])
def test_a_draft_model_is_refused_or_frozen_and_then_proven_untouched(engine: Engine, policy: Any, touch: bool) -> None:
    drafts = [torch.nn.Linear(2, 2) for _ in engine.schedulers]
    for scheduler, draft in zip(engine.schedulers, drafts, strict=True):
        runner = SimpleNamespace(model=draft)
        scheduler.draft_worker = SimpleNamespace(weight_update_runners=lambda runner=runner: [("draft", runner)])
    engine.adapter._beside["draft"] = policy
    if policy == "refuse":
        with pytest.raises(BindError, match=r"draft\.weight \(parameter of Linear\).*weight_sync\.draft=sync"):
            engine.bind("p")
        assert engine.log == []
        return
    engine.until_verified("s1")
    if not touch:
        assert engine.adapter.finish("s1", 7, "d", soon()).version == 7
        return
    with torch.no_grad():
        drafts[1].bias[1] += 1
    with pytest.raises(VerifyError, match=r"rollout rank 1: draft\.bias was declared frozen and has changed"):
        engine.adapter.finish("s1", 7, "d", soon())
    assert engine.version == "default"


def test_what_forbids_a_sync_is_in_the_description_and_refused_at_bind_as_well(engine: Engine) -> None:
    engine.schedulers[1].server_args.enable_eplb = True

    assert engine.adapter.describe(soon()).refusals[0].startswith("enable_eplb=True: experts")
    with pytest.raises(BindError, match="rollout rank 1: enable_eplb=True"):
        engine.bind("p")
    trainers: Any = SimpleNamespace(world=1, call=lambda method, payloads, deadline: {0: {}})
    with pytest.raises(BindError, match="engine e0 cannot be synced as it runs: enable_eplb=True"):
        connect(trainers, [engine.adapter], SyncSpec(None, Declared({}, {}, {})), soon())
    assert engine.log == []


def test_in_place_needs_an_engine_without_a_prefix_cache(engine: Engine) -> None:
    for scheduler in engine.schedulers:
        scheduler.server_args.disable_radix_cache = False

    assert engine.adapter.describe(soon()).pause_modes == ("abort", "retract")
    with pytest.raises(SessionError, match=r"with a prefix cache\) cannot pause with mode 'in_place'"):
        engine.adapter.pause("in_place", soon())
    assert engine.log == []
