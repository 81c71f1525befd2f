"""The trainer's witness on real trainers: what Megatron-Bridge and transformers export, against the layouts we declare.

The wrong declarations here are such that plans are made and digests would agree (tests/session/test_trainer_witness.py commits
them): only the export tells.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import MODELS

from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import BindError
from weight_sync.layout.parallel import TrainerDims
from weight_sync.session.contracts import describe_from_json
from weight_sync.session.inputs import Declared, PlanInputs, tensors_of

Inputs = Callable[[Any], dict[str, Any]]


def no_transport() -> Any:
    raise AssertionError("nothing is bound")


def heard(agent: Any, inputs: PlanInputs) -> dict[str, Any]:
    """What one rank's agent answers to plan and witness, as a controller asks."""
    plan = agent.call("plan", inputs.to_json())["digest"]
    try:
        elements = agent.call("witness", {"plan": plan, "controller": "1-00000000"})["elements"]
    except BindError as error:
        return {"refused": str(error), "witnessed": agent.call("describe", {})["witnessed"]}
    return {"elements": elements, "witnessed": agent.call("describe", {})["witnessed"], "plan": plan}


def megatron(rank: int, source: Path, parallel: dict[str, int], inputs: PlanInputs, overlap: bool) -> dict[str, Any]:
    from weight_sync.session.source import SourceAgent
    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel, overlap_param_gather=overlap)
    trainer.train_step()  # no two norms are alike from here on
    live = MegatronSource(trainer.chunks, trainer.optimizer)
    found = heard(SourceAgent(live, no_transport, export=trainer.exported), inputs)
    trainer.train_step()  # the trainer was released
    return found | {"held": sum(tensor.numel() for tensor in live.tensors().values())}


def declared(source: Path, parallel: dict[str, int], world: int, family: dict[str, Any] | None = None) -> PlanInputs:
    config = json.loads((source / "config.json").read_text())
    right = family_yaml(family_for(config))
    dims = TrainerDims(ranks=world, **parallel)
    symbols = {"vocab_multiple": 128 * dims.tp}
    convention = engine_yaml("sglang")
    rollout = {"tp": 1, "remainder": convention["remainder"]}
    model = tensors_of(Declared(right, config, rollout))
    assert model is not None
    return PlanInputs(
        Declared(family or right, config, {"ranks": world, **parallel}, None, symbols),
        Declared(right, config, rollout, convention),
        ["here"] * world,
        ["here"],
        dropped=[n for n in model.catalog.ids if any(f"model.layers.{layer}." in n for layer in model.layer_sets["mtp"])],
    )


@pytest.mark.parametrize(
    ("model", "parallel", "world", "overlap"),
    [
        pytest.param("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, 4, False, id="the demo's layout"),
        pytest.param("qwen2 tied", {"tp": 2, "pp": 2}, 4, False, id="tied, padded vocabulary, biases"),
        pytest.param(
            "deepseek_v3", {"pp": 2, "vpp": 2, "ep": 2}, 4, True, id="latents, MTP, virtual stages, overlapped gather"
        ),
        pytest.param("glm45", {"tp": 2, "etp": 2}, 2, False, id="float32 router bias, cut experts"),
    ],
)
def test_a_shipped_family_agrees_with_what_megatron_bridge_exports(
    model: str,
    parallel: dict[str, int],
    world: int,
    overlap: bool,
    checkpoint: Callable[..., Path],
    ranks: Callable[..., list[Any]],
) -> None:
    kind, sizes = MODELS[model]
    source = checkpoint(kind, **sizes)
    inputs = declared(source, parallel, world)
    layout = inputs.layouts()[0]
    filling = [sum(p.filling for p in layout.rank_params(rank)) for rank in range(world)]
    for rank, found in enumerate(ranks(world, megatron, source, parallel, inputs, overlap)):
        assert "refused" not in found, found["refused"]
        assert found["witnessed"] == layout.digest
        assert found["elements"] == found["held"] - filling[rank], "not every live element was compared"


def exchanged(family: dict[str, Any], label: str) -> dict[str, Any]:
    """The family with gate and up, or keys and values, exchanged: same names, shapes and coverage."""
    wrong = copy.deepcopy(family)
    rule = wrong["mcore"][label]
    if "parts" in rule:
        rule["parts"] = rule["parts"][::-1]
    else:
        rule["k"], rule["v"] = rule["v"], rule["k"]
    return wrong


@pytest.mark.parametrize(
    ("model", "label", "words"),
    [
        ("qwen3", "mlp_in", "model.layers.0.mlp.gate_proj.weight in decoder.layers.0.mlp.linear_fc1.weight: "),
        ("qwen3", "qkv", "model.layers.0.self_attn.k_proj.weight in decoder.layers.0.self_attention.linear_qkv.weight: "),
        ("qwen3_moe", "experts_in", "mlp.experts.0.gate_proj.weight in decoder.layers.0.mlp.experts.linear_fc1.weight0: "),
    ],
)
def test_a_damaged_family_is_refused_on_every_rank_that_holds_what_was_exchanged(
    model: str, label: str, words: str, checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    kind, sizes = MODELS[model]
    source = checkpoint(kind, **sizes)
    config = json.loads((source / "config.json").read_text())
    inputs = declared(source, {"tp": 2}, 2, exchanged(family_yaml(family_for(config)), label))
    for rank, found in enumerate(ranks(2, megatron, source, {"tp": 2}, inputs, False)):
        assert found["refused"].startswith(
            f"trainer rank {rank}: the declared layout is not what the trainer's own export holds: "
        )
        assert "elements differ, first at [" in found["refused"]
        assert found["witnessed"] == ""
        assert words in found["refused"]


def fsdp(rank: int, source: Path, options: dict[str, Any], damage: bool) -> dict[str, Any]:
    import dataclasses

    import torch.distributed as dist

    from weight_sync.session.connect import live_layout
    from weight_sync.session.source import SourceAgent
    from weight_sync_integrations.fsdp.model import build
    from weight_sync_integrations.fsdp.source import FsdpSource

    trainer = build(source, **options)
    trainer.train_step()
    live = FsdpSource(trainer.model, trainer.optimizer)
    if damage:
        names = {"q_norm": "k_norm", "k_norm": "q_norm"}
        live._views = [
            dataclasses.replace(v, tensor=".".join(names.get(part, part) for part in v.tensor.split("."))) for v in live._views
        ]
    agent = SourceAgent(live, no_transport, export=trainer.exported)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, agent.call("describe", {}))
    assert all(describe_from_json(one).shards for one in told)
    inputs = declared(source, {}, len(told))
    target = inputs.layouts()[1]
    explicit = live_layout(target.catalog, dict(enumerate(told)), ["float32"]).to_json()
    found = heard(agent, dataclasses.replace(inputs, source=explicit))
    trainer.train_step()
    return found | {"held": sum(tensor.numel() for tensor in live.tensors().values())}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("qwen3", {"dtype": "float32", "compute_dtype": "bfloat16"}, id="float32 masters"),
        pytest.param("qwen3_moe", {}, id="experts that transformers stacks"),
    ],
)
def test_what_fsdp2_shards_say_agrees_with_what_transformers_saves(
    kind: str, options: dict[str, Any], checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    sizes = {"tie_word_embeddings": True} if kind == "qwen3" else {}
    for found in ranks(3, fsdp, checkpoint(kind, **sizes), options, False):
        assert "refused" not in found, found["refused"]
        assert found["elements"] == found["held"]


def test_shards_that_name_another_tensor_are_refused(checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]) -> None:
    for rank, found in enumerate(ranks(2, fsdp, checkpoint("qwen3"), {}, True)):
        assert f"trainer rank {rank}: " in found["refused"]
        assert "model.layers.0.self_attn.k_norm.weight in model.layers.0.self_attn.q_norm.weight: " in found["refused"]


def test_an_fsdp2_export_is_the_checkpoint_that_it_writes(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    (streamed,) = ranks(1, streamed_and_saved, checkpoint("qwen3_moe"), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == saved.keys()
    assert all(torch.equal(torch.from_numpy(streamed[name]), saved[name].view(torch.int16)) for name in saved)


def streamed_and_saved(rank: int, source: Path, out: Path) -> dict[str, Any]:
    import torch

    from weight_sync_integrations.fsdp.model import build

    trainer = build(source)
    trainer.export_hf(out)
    return {name: tensor.contiguous().view(torch.int16).numpy().copy() for name, tensor in trainer.exported()}


@pytest.mark.parametrize("exported", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [False, True], ids=["host memory", "as on a GPU"])
def test_torch_tensors_are_compared_by_their_bits_wherever_they_are(device: bool, exported: str) -> None:
    """As on a GPU: with its views and casts, which are torch's, over tensors of this machine."""
    import torch

    from weight_sync.layout.catalog import Catalog, Pattern
    from weight_sync.layout.table import Param, layout_from_shards
    from weight_sync.session.device_memory import DeviceMemory
    from weight_sync.session.exported import Comparison
    from weight_sync.session.memory import Memory

    # A stack of two [3, 4] weights, each kept transposed, in float32; the model has bfloat16.
    live = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    catalog = Catalog(tuple(Pattern(name, (3, 4), "bfloat16") for name in ("a", "b")))
    shards = [
        {"tensor": name, "offset": [0, 0], "shape": [3, 4], "param": "stack", "start": 12 * i, "strides": [1, 3]}
        for i, name in enumerate(("a", "b"))
    ]
    param = Param(0, "stack", (2, 4, 3), "float32", cast_from="bfloat16")
    layout = layout_from_shards("trainer", catalog, [[param]], [shards])
    memory = (DeviceMemory if device else Memory)({"stack": live}, "trainer rank 0")
    whole = {name: live[i].T.to(getattr(torch, exported)) for i, name in enumerate(("a", "b"))}

    right = Comparison(layout, 0, memory)
    for name, tensor in whole.items():
        right.take(name, tensor)
    right.end()
    assert right.elements == 24

    wrong = Comparison(layout, 0, memory)
    wrong.take("a", whole["b"])
    changed = whole["b"].clone()
    changed[2, 1] = -changed[2, 1]
    wrong.take("b", changed)
    assert wrong.problems[0].startswith("a in stack: 12 of 12 elements differ, first at [0, 0] (element 0 of the parameter), ")
    assert wrong.problems[1].startswith("b in stack: 1 of 12 elements differ, first at [2, 1] (element 17 of the parameter), ")
