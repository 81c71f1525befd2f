"""Engine layouts that nobody declared: read from what the engines' loaders do, refused by name where that is not enough."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_support import DENSE, World, build, declared

from weight_sync.config import family_yaml
from weight_sync.errors import BindError
from weight_sync.session.inputs import Declared, Recorded
from weight_sync.session.recorded import ONE_WITNESS, published_catalog

HEAD = "lm_head.weight"
NORM = "model.norm.weight"


def recorded(world: World, *, family: bool = False, **left_out: Any) -> World:
    """The same job with the engines' side recorded. family: HF tensors are declared, as a Megatron trainer's must be."""
    side = world.sync._spec.rollout
    assert isinstance(side, Declared)
    for number, engine in enumerate(world.engines):
        assert engine._recording is not None
        for local, recording in engine._recording.items():
            params = world.layouts[1].rank_params(number * len(engine._recording) + local)
            padding = [p for p in params if p.filling]  # here always the last rows
            recording["constants"] = [
                {"param": p.name, "start": p.numel - p.filling, "shape": [p.filling], "strides": [1], "value": 0.0}
                for p in padding
            ]
            recording["rewritten"] = {}
    rollout = Recorded(side.config, side.dims, side.family if family else None, **left_out)
    world.sync._spec = replace(world.sync._spec, rollout=rollout)
    return world


def refused(world: World, *words: str) -> None:
    with pytest.raises(BindError) as caught:
        world.sync.sync(1)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert world.sync.version == -1
    assert not {v for _, v in world.traps.log} & {"quiesce", "pause", "begin", "write"}
    assert all(engine.serving for engine in world.engines)


@pytest.mark.parametrize("engines", [1, 2])
def test_nothing_is_declared_and_every_byte_arrives(engines: int, caplog: pytest.LogCaptureFixture) -> None:
    world = recorded(build(declared(rollout={"tp": 2, "engines": engines}), explicit=True))
    with caplog.at_level(logging.WARNING, logger="weight_sync"):
        world.commit(1)
        world.step()
        world.commit(2)
    assert [record.message for record in caplog.records] == [ONE_WITNESS], "said once for each connection"


def test_a_declared_trainer_is_synced_to_a_recorded_engine() -> None:
    recorded(build(), family=True).commit(1)


def test_an_engine_of_another_architecture_is_refused_also_without_a_family() -> None:
    world = recorded(build(explicit=True))
    world.engines[0]._model = dict(DENSE)
    refused(world, "engine e0 serves another model: architectures=['Qwen3ForCausalLM'], not ['Qwen3MoeForCausalLM']")


def _computed(recording: dict[str, Any]) -> None:
    recording["unexplained"] = {"model.layers.0.mlp.gate.weight": "cast from bfloat16 to float32"}


def _twice(recording: dict[str, Any]) -> None:
    recording["rewritten"] = {NORM: 24}


def _not_loaded(recording: dict[str, Any]) -> None:
    recording["shards"] = [s for s in recording["shards"] if s["param"] != NORM]


def _half_loaded(recording: dict[str, Any]) -> None:
    shard = next(s for s in recording["shards"] if s["param"] == NORM)
    shard["shape"] = [20]


def _over_itself(recording: dict[str, Any]) -> None:
    shard = next(s for s in recording["shards"] if s["param"] == NORM)
    recording["shards"].append(dict(shard))


def _into_padding(recording: dict[str, Any]) -> None:
    constant = next(c for c in recording["constants"] if c["param"] == HEAD)
    constant["start"] -= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _computed,
            ("engine e0, worker 1", "model.layers.0.mlp.gate.weight: cast from bfloat16 to float32", "weight_sync.engine=auto"),
        ),
        (_twice, ("engine e0, worker 1", f"{NORM}: 24 elements", "twice")),
        (_not_loaded, ("engine e0, worker 1", f"{NORM}: 24 of 24 elements are written by no HF tensor", "untouched")),
        (_half_loaded, (f"{NORM}: 4 of 24 elements are written by no HF tensor",)),
        (_over_itself, (f"{NORM}: 24 of 24 elements are written more than once",)),
        (_into_padding, (f"{HEAD}: a part is set to a constant and written as well",)),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_what_a_loader_does_besides_placing_each_element_once_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], words: tuple[str, ...]
) -> None:
    world = recorded(build(explicit=True))
    assert world.engines[0]._recording is not None
    change(world.engines[0]._recording[1])
    refused(world, *words)


def _without_head(world: World) -> None:
    for recording in (world.engines[0]._recording or {}).values():
        for kind in ("shards", "constants"):
            recording[kind] = [item for item in recording[kind] if item["param"] != HEAD]


def test_a_tensor_that_no_loader_takes_is_refused_unless_it_is_named() -> None:
    world = recorded(build(explicit=True), untouched=(HEAD,))
    _without_head(world)
    refused(world, f"take nothing of 1 HF tensors: {HEAD}", "weight_sync.recorded.unserved")


def test_what_is_named_as_unserved_and_untouched_keeps_its_bytes_and_the_rest_arrives() -> None:
    world = recorded(build(explicit=True), untouched=("lm_*",), unserved=("lm_*",))
    _without_head(world)
    before = [(buffer.arrays[HEAD].copy(), buffer.arrays[NORM].copy()) for buffer in world.target]
    world.sync.sync(1)
    for (head, norm), buffer in zip(before, world.target, strict=True):
        assert (head == buffer.arrays[HEAD]).all()
        assert (norm != buffer.arrays[NORM]).any()
    assert [engine.version for engine in world.engines] == [1]


@pytest.mark.parametrize("key", ["untouched", "unserved"])
def test_a_name_that_leaves_nothing_out_is_refused(key: str) -> None:
    refused(recorded(build(explicit=True), **{key: ("no.such.*",)}), f"weight_sync.recorded.{key}", "no.such.*")


def test_a_trainer_that_publishes_no_shards_is_told_to_declare_a_family() -> None:
    refused(recorded(build()), "trainer rank 0 publishes no shards", "weight_sync.family")


def test_trainer_ranks_that_hold_a_tensor_in_two_dtypes_are_refused_by_name() -> None:
    shard = {"tensor": "w", "param": "w", "offset": [0], "shape": [2]}
    ranks = {
        rank: {"shards": [shard], "params": [{"name": "w", "dtype": dtype}]}
        for rank, dtype in enumerate(("bfloat16", "float32"))
    }
    with pytest.raises(BindError, match="w: trainer rank 0 has 1 dims of bfloat16, rank 1 1 of float32"):
        published_catalog(ranks)


def test_a_family_written_as_one_yaml_file_is_synced_end_to_end(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("name: mine\nextends: [qwen3_moe]\narchitectures: [MineForCausalLM]\n")
    sides = [replace(side, family=family_yaml(str(own)), config={**side.config, "architectures": ["MineForCausalLM"]})
             for side in declared()]  # fmt: skip
    convention = sides[1].convention
    assert convention is not None
    build((sides[0], sides[1])).commit(1)
