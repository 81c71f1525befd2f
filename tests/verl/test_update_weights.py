"""verl's own CheckpointEngineManager, CheckpointEngineWorker and ActorRolloutRefWorker on Ray with our backend.

In the environment verl real vLLM servers, in verl-sglang real SGLang ones, both in bfloat16; in front of them by turns

    fsdp2       two ranks with float32 masters, verl's default; with vLLM only, layouts.py has SGLang
    megatron    two ranks in bfloat16, experts over both, dense weights cut by tp2

The tests of one pair share one job and run in file order; each is one or two calls of manager.update_weights.

Expected weights are verl's own export of whole tensors, joined as the engine joins them; live ones are read by a function that
runs in the engine's worker. Neither uses code of ours.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from benchmarks.verl_inside import break_next_write, role_of
from benchmarks.verl_rig import Rig, cpu_overrides, make_model, rollouts, started

KIND = rollouts()[0]
ACTORS = {"vllm": ["fsdp2", "megatron"], "sglang": ["megatron"]}[KIND]
every = pytest.mark.parametrize("rig", ACTORS, indirect=True)
only_fsdp2 = pytest.mark.parametrize("rig", [name for name in ACTORS if name == "fsdp2"], indirect=True)
# Seven processes import torch, verl or the engine; the first test of each pair waits for that.
pytestmark = pytest.mark.timeout(900)
# verl installs a package `tests` of its own, under which workers would look for the functions that are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROMPT = list(range(3, 60))  # longer than a block of KV


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    # The trainer's witness in every job: what verl would send as whole tensors agrees with the layout, or nothing begins.
    overrides = ["+weight_sync=p2p_tcp", "weight_sync.verify.trainer_witness=true"]
    folder = tmp_path_factory.mktemp("model")
    if request.param == "fsdp2":
        overrides += cpu_overrides(make_model(folder, num_hidden_layers=2), dtype="bfloat16", kind=KIND)
    else:
        # 320 rows: what Megatron-LM would pad to 512, and verl's bridge does not.
        model = make_model(folder, kind="qwen3_moe", num_hidden_layers=2, vocab_size=320)
        overrides += cpu_overrides(model, dtype="bfloat16", actor="megatron", kind=KIND)
        sizes = {"tensor_model": 2, "expert_model": 2, "expert_tensor": 1}
        overrides += [f"actor_rollout_ref.actor.megatron.{key}_parallel_size={size}" for key, size in sizes.items()]
    with started(overrides) as running:
        yield running


def on_actor(rig: Rig, rank: int, call: Any, *arguments: Any) -> Any:
    return ray.get(rig.actors.workers[rank].__ray_call__.remote(call, *arguments), timeout=120)


def epochs(worker: Any) -> tuple[Any, Any]:
    from weight_sync_integrations.verl import controller

    made = controller._controller
    return made._connection.epochs, made._trainer_epochs


def witnessed(worker: Any) -> str:
    from weight_sync_integrations.verl import actor

    agent = actor.side().agent
    return agent.call("describe", {})["witnessed"]


@every
def test_every_actor_rank_writes_its_shards_into_live_weights_and_verl_gets_its_metrics(rig: Rig) -> None:
    rig.change(1)
    metrics = rig.manager.update_weights(1)
    assert rig.differing() == []
    layout, other = (on_actor(rig, rank, witnessed) for rank in (0, 1))
    assert layout == other != "", "verl's own export was not compared"
    held = torch.float32 if rig.config.actor_rollout_ref.actor.strategy == "fsdp2" else torch.bfloat16
    assert {tensor.dtype for tensor in rig.expected().values()} == {held}
    assert metrics["weight_sync/version"] == 1
    assert metrics["weight_sync/committed"] == metrics["weight_sync/verified"] == 1
    assert metrics["weight_sync/gathered_bytes"] == metrics["weight_sync/stepped_down"] == 0
    assert metrics["checkpoint_engine/payload_mbytes"] * 2**20 == metrics["weight_sync/bytes"] > 0
    # Reduced over both ranks although verl merges their dicts by overwriting.
    assert metrics["weight_sync/rank_seconds_skew"] >= 1.0
    assert metrics["weight_sync/rank_seconds_slowest"] in (0, 1)
    assert metrics["weight_sync/rank_seconds_max"] > metrics["weight_sync/rank_seconds_mean"] > 0
    assert rig.cached(PROMPT) == 0
    assert rig.cached(PROMPT) >= 32
    assert rig.generate(PROMPT, 4).extra_fields["global_steps"] == 1


@pytest.fixture(scope="module")
def waiting(rig: Rig) -> list[Any]:
    """A request that came while the servers stood; filled by the next test."""
    return []


@every
def test_a_sync_that_fails_reaches_the_driver_and_nothing_is_resumed(rig: Rig, waiting: list[Any]) -> None:
    on_actor(rig, 1, break_next_write)
    rig.change(2)
    with pytest.raises(ray.exceptions.RayTaskError, match="cable pulled") as failed:
        rig.manager.update_weights(2)
    assert type(failed.value.cause).__name__ == "TransportError"
    assert rig.paused()
    assert rig.version() == "1"
    sampling = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    waiting.append(rig.servers.server_handles[0].generate.remote(PROMPT, sampling, "waits"))
    assert ray.wait(waiting, timeout=2)[0] == []
    # Also for whoever catches the error and resumes the replicas.
    with pytest.raises(ray.exceptions.RayTaskError, match="hold weights of a sync that failed"):
        rig.manager.resume_generation_replicas()
    assert rig.paused()
    assert ray.wait(waiting, timeout=1)[0] == []


@every
def test_the_next_sync_works_and_serves_what_has_waited_with_the_new_weights_only(rig: Rig, waiting: list[Any]) -> None:
    rig.change(3)
    metrics = rig.manager.update_weights(3)
    assert metrics["weight_sync/version"] == 3
    assert rig.differing() == []
    answer = ray.get(waiting[0], timeout=60)
    assert answer.extra_fields["global_steps"] == 3
    assert answer.extra_fields.get("num_cached_tokens", 0) == 0  # the KV of version 1 is gone; SGLang's server does not tell
    assert rig.version() == "3"
    assert answer.token_ids == rig.generate(PROMPT, 4).token_ids


def move_engine(worker: Any) -> None:
    """What sleep and wake-up do to weights: the same parameters at other addresses."""
    for parameter in worker.model_runner.get_model().parameters():
        parameter.data = parameter.data.clone()


def move_actor(worker: Any) -> None:
    for parameter in role_of(worker).actor.engine.module.parameters():
        parameter._local_tensor = parameter._local_tensor.clone()


@only_fsdp2
def test_addresses_that_have_gone_stale_on_either_side_are_published_anew_by_epoch(rig: Rig) -> None:
    before = on_actor(rig, 0, epochs)
    rig.manager.update_weights(4)
    assert on_actor(rig, 0, epochs) == before, "nothing has moved: the binding is kept"
    ray.get(rig.servers.server_handles[0].collective_rpc.remote(move_engine), timeout=60)
    on_actor(rig, 1, move_actor)
    rig.change(5)
    rig.manager.update_weights(5)
    assert rig.differing() == []
    engine, actor = on_actor(rig, 0, epochs)
    assert engine != before[0]
    assert (actor[0] == before[1][0], actor[1] == before[1][1]) == (True, False)


@only_fsdp2
def test_a_step_that_comes_again_is_sent_again_as_a_version_of_its_own(rig: Rig) -> None:
    rig.change(6)
    assert rig.manager.update_weights(5)["weight_sync/version"] == 6
    assert rig.differing() == []
    assert rig.generate(PROMPT, 1).extra_fields["global_steps"] == 5


def declare_wrongly(worker: Any, fallback: str | None) -> None:
    """As if the job had been started with a family that does not fit, and this backend to step down to."""
    from weight_sync_integrations.verl import actor, backend, controller

    engine = backend.worker_engine(worker)
    sync = dataclasses.replace(engine.settings.sync, family="qwen2")
    engine.settings = dataclasses.replace(engine.settings, sync=sync, fallback=fallback, fallback_kwargs={"device": "cpu"})
    actor._side = controller._controller = None


def start_again(rig: Rig, fallback: str | None) -> None:
    workers = [*rig.actors.workers, *(worker for replica in rig.manager.replicas for worker in replica.workers)]
    ray.get([worker.__ray_call__.remote(declare_wrongly, fallback) for worker in workers], timeout=60)


@only_fsdp2
def test_a_layout_that_does_not_allow_it_is_an_error_before_a_byte_is_written(rig: Rig) -> None:
    start_again(rig, None)
    (before,) = rig.live()
    rig.change(7)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"FamilyError|BindError"):
        rig.manager.update_weights(7)
    (after,) = rig.live()
    assert all(torch.equal(after[name], before[name]) for name in before)


@only_fsdp2
def test_with_a_backend_named_the_job_steps_down_to_it_and_says_why(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """verl's own Mooncake engine on the CPU: whole tensors from rank 0, then verl's bucketed load."""
    start_again(rig, "mooncake")
    rig.change(8)
    with caplog.at_level(logging.WARNING, logger="weight_sync"):
        metrics = rig.manager.update_weights(8)
    assert metrics == {"weight_sync/stepped_down": 1}
    assert "stepping down from shard to shard to verl's backend mooncake: " in caplog.text
    assert "q_norm" in caplog.text or "qwen2" in caplog.text
    assert rig.differing() == []
    assert rig.generate(PROMPT, 1).extra_fields["global_steps"] == 8
