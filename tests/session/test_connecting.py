"""Everything that does not fit is one error of connect(), before an engine is paused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from session_support import DENSE, MOE, World, build, declared, rows_over

from weight_sync.errors import BindError, ConfigError, FamilyError, ParallelError, PlanError, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.calls import add_error, on_each, together
from weight_sync.session.connect import SyncSpec
from weight_sync.session.inprocess import typed
from weight_sync.session.inputs import Declared, PlanInputs, dims_of, dropped_names
from weight_sync.session.session import WeightSync


def refused(world: World, kind: type[BaseException], match: str) -> BaseException:
    with pytest.raises(kind, match=match) as caught:
        world.sync.sync(1)
    assert not {v for _, v in world.traps.log} & {"quiesce", "pause", "begin", "write"}
    assert all(engine.serving for engine in world.engines)
    return caught.value


# -- engines -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_serves_another_model_is_refused() -> None:
    world = build()
    world.engines[0]._model = dict(DENSE)
    refused(world, BindError, r"engine e0 serves another model: .*Qwen3ForCausalLM")


def test_an_engine_whose_model_has_other_sizes_is_refused() -> None:
    world = build()
    world.engines[0]._model = MOE | {"moe_intermediate_size": 48}
    refused(world, BindError, "engine e0 serves a model of other sizes: .* 12 here, 48 there")


def test_an_engine_with_other_parallel_sizes_is_refused() -> None:
    world = build()
    world.engines[0]._sizes["moe_ep"] = 2
    refused(world, BindError, "engine e0 runs with other parallel sizes: moe_ep=1 declared, 2 live")


def test_an_engine_with_another_number_of_workers_is_refused() -> None:
    world = build()
    del world.engines[0]._agents[1]
    refused(world, ParallelError, r"engine e0: tp=2 \* pp=1 = 2, but there are 1 ranks")


def test_a_worker_that_sits_elsewhere_on_the_mesh_is_refused() -> None:
    world = build()
    world.target_agents[0].coords["tp"] = 1
    refused(world, BindError, "engine e0, worker 0 sits elsewhere on the mesh: tp 0 declared, 1 live")


def test_another_number_of_engines_than_declared_is_refused() -> None:
    world, other = build(), build().engines[0]
    other.name = "e1"
    world.sync = WeightSync(world.trainers, [*world.engines, other], world.sync._spec)
    refused(world, BindError, "rollout.engines=1, but 2 engines are connected")


def test_two_engines_of_one_name_are_refused_for_one_of_them_would_never_be_paused() -> None:
    world = build(declared(rollout={"tp": 2, "engines": 2}))
    world.engines[1].name = "e0"
    with pytest.raises(BindError, match="engines need names of their own, got e0, e0"):
        WeightSync(world.trainers, world.engines, world.sync._spec)


def test_a_pause_mode_that_an_engine_does_not_offer_is_refused_before_the_trainer_is_held() -> None:
    refused(build(pause="in_place"), BindError, "engine e0 cannot pause with mode in_place; it offers abort, retract")


def test_no_engines_are_refused() -> None:
    world = build()
    with pytest.raises(SessionError, match="no engines"):
        WeightSync(world.trainers, [], world.sync._spec)


@pytest.mark.parametrize("change", ["shape", "dtype", "absent", "extra"])
def test_live_engine_parameters_that_are_not_the_declared_ones_are_refused_by_name(change: str) -> None:
    world = build()
    arrays = world.target[1].arrays
    name = "model.layers.1.self_attn.o_proj.weight"
    if change == "shape":
        arrays[name] = typed(np.asarray(arrays[name])[:, :-1].copy(), "bfloat16")
    elif change == "dtype":
        arrays[name] = typed(np.asarray(arrays[name]), "float16")
    elif change == "absent":
        del arrays[name]
    else:
        arrays["model.rotary.table"] = np.zeros(4, np.float32)
        name = "model.rotary.table"
    text = str(refused(world, BindError, f"rollout rank 1: the declared layout is not the live one: {name}: "))
    wanted = {
        "shape": "planned [[24, 12], 'bfloat16'], live [[24, 11], 'bfloat16']",
        "dtype": "planned [[24, 12], 'bfloat16'], live [[24, 12], 'float16']",
        "absent": "live absent",
        "extra": "live [[4], 'float32'], not planned",
    }
    assert wanted[change] in text


def test_engine_memory_smaller_than_its_parameter_is_refused() -> None:
    world = build()
    whole = world.target[1].arrays["model.norm.weight"]

    class Short:
        """A tensor whose storage was cut, as a framework's offloading may leave it."""

        shape, dtype = whole.shape, "bfloat16"

        def stride(self) -> tuple[int, ...]:
            return (1,)

        def storage_offset(self) -> int:
            return 0

        def element_size(self) -> int:
            return 2

        def untyped_storage(self) -> Any:
            class Storage:
                data_ptr = staticmethod(lambda: int(whole.ctypes.data))
                nbytes = staticmethod(lambda: 46)

            return Storage

    world.target[1].arrays["model.norm.weight"] = Short()
    refused(world, BindError, "rollout rank 1: .*model.norm.weight needs 48 bytes of its storage, which has 46")


def test_a_worker_that_does_not_answer_bind_is_missed() -> None:
    world = build()
    engine = world.engines[0]
    original = engine.bind
    engine.bind = lambda tables, deadline: {0: original(tables, deadline)[0]}  # type: ignore[method-assign]
    refused(world, BindError, r"engine e0: workers \[0\] of 2 answered bind")


# -- trainer -----------------------------------------------------------------------------------------------------------


def test_another_number_of_trainer_ranks_than_declared_is_refused() -> None:
    world = build()
    world.sync._spec = replace(world.sync._spec, trainer=declared(trainer={"ranks": 4, "tp": 2, "ep": 2})[0])
    refused(world, ParallelError, r"trainer: tp=2 \* .*dp=2 = 4, but there are 2 ranks")


def test_a_trainer_rank_that_sits_elsewhere_on_the_mesh_is_refused() -> None:
    world = build()
    world.sources[1].coords = {"tp": 0, "pp": 0}
    refused(world, BindError, "trainer rank 1 sits elsewhere on the mesh than declared: tp 1 declared, 0 live")


def test_live_trainer_parameters_that_are_not_the_declared_ones_are_refused_by_name() -> None:
    world = build()
    arrays = dict(world.sources[0].arrays)
    name = next(iter(arrays))
    arrays["adapter.weight"] = arrays.pop(name)
    world.sources[0].arrays = arrays
    text = str(refused(world, BindError, "trainer rank 0: the declared layout is not the live one"))
    assert f"{name}: planned" in text
    assert "live absent" in text
    assert "adapter.weight: live" in text


def test_a_trainer_without_shards_and_without_a_declared_layout_is_refused() -> None:
    world = build(explicit=True)
    world.sources[1].shards = None
    refused(world, BindError, "trainer rank 1 publishes no shards, and no trainer layout is declared")


def test_published_shards_that_leave_an_element_out_are_refused_by_name() -> None:
    world = build(explicit=True)
    shards = world.sources[1].shards
    assert shards is not None
    gone = next(s for s in shards if s["tensor"] == "model.norm.weight")
    shards.remove(gone)
    refused(world, PlanError, "model.norm.weight")


def test_a_published_shard_of_a_tensor_the_family_does_not_have_is_refused() -> None:
    world = build(explicit=True)
    shards = world.sources[0].shards
    assert shards is not None
    shards[0] = shards[0] | {"tensor": "model.unknown.weight"}
    refused(world, FamilyError, "trainer rank 0 holds model.unknown.weight, which the model's family does not declare")


def test_a_trainer_of_another_dtype_is_refused_by_tensor() -> None:
    world = build()
    world.sync._spec = replace(world.sync._spec, trainer=declared(MOE | {"dtype": "float32"})[0])
    refused(world, PlanError, "model.*float32")


def test_ranks_that_compute_another_plan_are_told_by_digest() -> None:
    world = build()
    agent = world.source_agents[1]
    original = agent._plan

    def elsewhere(payload: Any) -> dict[str, Any]:
        return original({**payload, "target_hosts": ["another host"] * 2})

    agent._plan = elsewhere  # type: ignore[method-assign]
    text = str(refused(world, PlanError, "trainer ranks computed another plan than the controller's"))
    assert "{1: '" in text


def test_plan_inputs_survive_json_with_an_equal_digest() -> None:
    import json

    for explicit in (False, True):
        world = build(explicit=explicit)
        source: Any = rows_over(declared()[0], 2).to_json() if explicit else declared()[0]
        inputs = PlanInputs(source, declared()[1], ["a", "b"], ["a", "b"])
        again = PlanInputs.from_json(json.loads(json.dumps(inputs.to_json())))
        assert again.schedule().digest == inputs.schedule().digest
        assert world.sync.connect().schedule.digest != inputs.schedule().digest, "hosts are part of the plan"


@pytest.mark.parametrize("dims", [{"tp": 2, "depth": 3}, {}])
def test_parallel_sizes_of_unknown_names_are_a_config_error(dims: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="trainer parallel sizes"):
        dims_of(Declared({}, {}, dims), "trainer")


# -- the second witness ------------------------------------------------------------------------------------------------


def _shard(world: World, tensor: str, rank: int = 1) -> dict[str, Any]:
    recording = world.engines[0]._recording
    assert recording is not None
    found = [s for s in recording[rank]["shards"] if s["tensor"] == tensor]
    assert found
    return found[0]


K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def test_a_recording_that_places_a_tensor_elsewhere_is_refused_with_both_boxes() -> None:
    world = build()
    shard = _shard(world, K_PROJ)
    start = shard["start"]
    shard["start"] += 24
    text = str(refused(world, BindError, "rollout rank 1: the declared layout is not what the engine's own loader does"))
    assert f"{K_PROJ} -> model.layers.0.self_attn.qkv_proj.weight: declared [12:24, 0:24] at element {start} " in text
    assert f"recorded [12:24, 0:24] at element {start + 24} " in text


def test_a_recording_of_another_box_is_refused() -> None:
    world = build()
    _shard(world, K_PROJ)["offset"] = [0, 0]
    text = str(refused(world, BindError, K_PROJ))
    assert "declared [12:24, 0:24], of which 0 of 288 elements were recorded" in text


def test_a_recording_with_other_strides_is_refused() -> None:
    world = build()
    shard = _shard(world, "model.layers.1.self_attn.o_proj.weight")
    shard["strides"] = list(reversed(shard["strides"]))
    refused(world, BindError, "model.layers.1.self_attn.o_proj.weight .*declared .* with strides .*, recorded .* with strides")


def test_a_tensor_that_only_one_witness_places_is_refused() -> None:
    world = build()
    recording = world.engines[0]._recording
    assert recording is not None
    recording[1]["shards"].remove(_shard(world, K_PROJ))
    refused(world, BindError, f"{K_PROJ} -> .*: only declared")
    world = build()
    recording = world.engines[0]._recording
    assert recording is not None
    recording[0]["shards"].append(_shard(world, "model.norm.weight", 0) | {"param": "draft.norm.weight"})
    refused(world, BindError, "rollout rank 0: .*model.norm.weight -> draft.norm.weight: only recorded")


def test_an_operation_the_recorder_could_not_express_is_refused_by_name() -> None:
    world = build()
    recording = world.engines[0]._recording
    assert recording is not None
    recording[0]["unexplained"] = {K_PROJ: "aten.mul"}
    refused(world, BindError, f"rollout rank 0: .*{K_PROJ}: the loader applies aten.mul, which is no move of elements")


def test_a_recording_in_smaller_boxes_agrees() -> None:
    world = build()
    recording = world.engines[0]._recording
    assert recording is not None
    whole = _shard(world, K_PROJ)
    rows = [
        whole | {"offset": [12 + i, 0], "shape": [1, 24], "start": whole["start"] + i * whole["strides"][0]} for i in range(12)
    ]
    recording[1]["shards"] = [s for s in recording[1]["shards"] if s is not whole] + rows
    world.commit(1)


def test_a_half_that_is_recorded_twice_does_not_stand_for_the_other_half() -> None:
    world = build()
    recording = world.engines[0]._recording
    assert recording is not None
    whole = _shard(world, K_PROJ)
    half = whole | {"shape": [6, 24]}
    recording[1]["shards"] = [s for s in recording[1]["shards"] if s is not whole] + [half, dict(half)]
    refused(world, BindError, rf"{K_PROJ} .*recorded \[12:18, 0:24\] and then \[12:18, 0:24\] over it")


def test_a_worker_that_was_not_recorded_is_missed() -> None:
    world = build()
    recording = world.engines[0]._recording
    assert isinstance(recording, dict)
    del recording[1]
    refused(world, BindError, r"engine e0: workers \[0\] of 2 were recorded")


def test_without_the_witness_no_engine_is_recorded() -> None:
    world = build(witness=False)
    world.commit(1)
    assert "record" not in world.traps.verbs("engine e0")


def test_every_expert_of_a_stack_is_checked_for_every_rank() -> None:
    world = build()
    shard = _shard(world, "model.layers.1.mlp.experts.5.down_proj.weight")
    shard["start"] -= 1
    refused(world, BindError, "rollout rank 1: .*experts.5.down_proj.weight -> model.layers.1.mlp.experts.w2_weight")


# -- calls at once -----------------------------------------------------------------------------------------------------

SOON = Deadline.after(60)


def test_together_returns_all_results_in_the_order_of_the_calls() -> None:
    assert list(together({key: (lambda k=key: k * 2) for key in (3, 1, 2)}, SOON).items()) == [(3, 6), (1, 2), (2, 4)]
    assert together({}, SOON) == {}


def test_together_waits_for_all_and_keeps_every_error_with_what_was_noted_on_it() -> None:
    done: list[str] = []

    def bad(name: str, note: str | None = None) -> None:
        done.append(name)
        error = ValueError(name)
        if note:
            error.add_note(note)
        raise error

    with pytest.raises(ValueError, match="b") as caught:
        together({"a": lambda: done.append("a"), "b": lambda: bad("b", "own"), "c": lambda: bad("c", "deep"),
                  "d": lambda: bad("d")}, SOON)  # fmt: skip
    assert sorted(done) == ["a", "b", "c", "d"]
    assert caught.value.__notes__ == ["own", "also c: ValueError: c", "also c: deep", "also d: ValueError: d"]


def test_an_error_may_be_noted_on_itself() -> None:
    error = ValueError("one object raised twice")
    error.add_note("a note")
    add_error(error, "also b", error)
    assert error.__notes__ == ["a note", "also b: ValueError: one object raised twice"]


def test_on_each_gives_every_engine_its_own_index() -> None:
    world = build(declared(rollout={"tp": 2, "engines": 2}))
    assert on_each(world.engines, lambda i, engine: (i, engine.name), SOON) == {0: (0, "e0"), 1: (1, "e1")}


def test_a_spec_without_a_trainer_reads_the_layout_from_live_shards() -> None:
    world = build(explicit=True)
    assert isinstance(world.sync._spec, SyncSpec)
    assert world.sync._spec.trainer is None
    world.commit(1)


def test_a_model_with_tied_embeddings_drops_nothing_and_syncs() -> None:
    sides = declared(DENSE | {"tie_word_embeddings": True}, rollout={"tp": 1, "pp": 2})
    assert dropped_names(sides[1], "rollout") == ()
    build(sides).commit(1)
