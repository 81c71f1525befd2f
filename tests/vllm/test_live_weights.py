"""A vLLM engine on the plain CPU path: right tokens, live weights, and bytes that are those of vLLM's own loaders.

Each layout is run once in a forked engine that collects facts; the tests then look at the facts. The expected bytes come
from hand_slices(), written from the table in integrations/vllm/README.md and from nothing of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ENVIRONMENT, build_engine, greedy, greedy_transformers
from weight_sync.config import engine_yaml, family_yaml
from weight_sync.layout.witness import agree
from weight_sync.session.inputs import Declared, layout_of

TOKEN = ENVIRONMENT["WEIGHT_SYNC_TOKEN"]


@dataclass(frozen=True)
class Layout:
    kind: str
    tp: int = 1
    pp: int = 1
    ep: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = "".join(f"-{key}={value}" for key, value in self.sizes.items())
        return f"{self.kind}-tp{self.tp}-pp{self.pp}{'-ep' if self.ep else ''}{extra}"

    def __hash__(self) -> int:
        return hash(str(self))


LAYOUTS = [
    Layout("qwen3"),
    Layout("qwen3", tp=2),
    Layout("qwen3", pp=2, sizes={"num_hidden_layers": 5}),
    Layout("qwen3", tp=2, sizes={"tie_word_embeddings": True, "vocab_size": 250}),
    Layout("qwen3", pp=2, sizes={"tie_word_embeddings": True, "num_hidden_layers": 3}),
    Layout("qwen3", tp=4),  # two KV heads on four ranks: replicated
    Layout("qwen3_moe"),
    Layout("qwen3_moe", tp=2),
    Layout("qwen3_moe", tp=2, ep=True),
    Layout("qwen3_moe", pp=2),
    Layout("qwen3_moe", pp=2, sizes={"tie_word_embeddings": True}),
]


def hand_slices(hf: dict[str, Any], config: dict[str, Any], layout: Layout, rank: int) -> dict[str, Any]:
    """Every live tensor of one worker, cut out of the HF tensors by hand."""
    import torch

    stage, tp = divmod(rank, layout.tp)
    layers = config["num_hidden_layers"]
    counts = [layers // layout.pp] * layout.pp
    for i in range(layers % layout.pp):
        counts[-(i + 2)] += 1
    first = sum(counts[:stage])
    moe = layout.kind == "qwen3_moe"
    live: dict[str, Any] = {}

    def rows(tensor: Any) -> Any:
        return tensor.chunk(layout.tp, 0)[tp]

    def columns(tensor: Any) -> Any:
        return tensor.chunk(layout.tp, 1)[tp]

    def vocab(tensor: Any) -> Any:
        padded = -(-tensor.shape[0] // 64) * 64
        return rows(torch.cat([tensor, tensor.new_zeros(padded - tensor.shape[0], tensor.shape[1])]))

    last = stage == layout.pp - 1
    tied = config["tie_word_embeddings"]
    if stage == 0 or moe or (tied and last):
        live["model.embed_tokens.weight"] = vocab(hf["model.embed_tokens.weight"])
    if last or moe:
        live["model.norm.weight"] = hf["model.norm.weight"]
        if not tied:
            live["lm_head.weight"] = vocab(hf["lm_head.weight"])
    kv_heads, head = config["num_key_value_heads"], config["head_dim"]
    for layer in range(first, first + counts[stage]):
        own = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            live[f"{own}{name}.weight"] = hf[f"{own}{name}.weight"]
        parts = [rows(hf[own + "self_attn.q_proj.weight"])]
        for name in ("k_proj", "v_proj"):
            whole = hf[f"{own}self_attn.{name}.weight"]
            if kv_heads >= layout.tp:
                parts.append(rows(whole))
            else:
                which = tp // (layout.tp // kv_heads)
                parts.append(whole[which * head : (which + 1) * head])
        live[own + "self_attn.qkv_proj.weight"] = torch.cat(parts)
        live[own + "self_attn.o_proj.weight"] = columns(hf[own + "self_attn.o_proj.weight"])
        if not moe:
            gate, up = (hf[f"{own}mlp.{name}_proj.weight"] for name in ("gate", "up"))
            live[own + "mlp.gate_up_proj.weight"] = torch.cat([rows(gate), rows(up)])
            live[own + "mlp.down_proj.weight"] = columns(hf[own + "mlp.down_proj.weight"])
            continue
        live[own + "mlp.gate.weight"] = hf[own + "mlp.gate.weight"]
        experts = list(range(hf_experts(hf, own)))
        if layout.ep:
            each = len(experts) // layout.tp
            experts = experts[tp * each : (tp + 1) * each]
        w13, w2 = [], []
        for expert in experts:
            gate, up, down = (hf[f"{own}mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            w13.append(torch.cat([gate, up] if layout.ep else [rows(gate), rows(up)]))
            w2.append(down if layout.ep else columns(down))
        live[own + "mlp.experts.routed_experts.w13_weight"] = torch.stack(w13)
        live[own + "mlp.experts.routed_experts.w2_weight"] = torch.stack(w2)
    return live


def hf_experts(hf: dict[str, Any], layer: str) -> int:
    return sum(name.startswith(f"{layer}mlp.experts.") and name.endswith(".up_proj.weight") for name in hf)


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


# -- functions that run in the workers; collective_rpc passes the worker first -----------------------------------------


def _tensors(worker: Any) -> dict[str, Any]:
    from weight_sync_integrations.vllm import live

    return live.inspect(worker.model_runner.get_model()).tensors


def _differences(worker: Any, folder: Path, layout: Layout) -> list[str]:
    """Names of live tensors that are not, byte for byte, the hand-made slices of a checkpoint."""
    import torch

    expected = hand_slices(*read_checkpoint(folder), layout, worker.rank)
    found = _tensors(worker)
    wrong = sorted(expected.keys() ^ found.keys())
    for name in expected.keys() & found.keys():
        same = found[name].dtype == expected[name].dtype and torch.equal(
            found[name].contiguous().view(torch.uint8), expected[name].contiguous().view(torch.uint8)
        )
        if not same:
            wrong.append(name)
    return wrong


def _write_raw(worker: Any, folder: Path, layout: Layout) -> None:
    """What a one-sided write does: bytes to addresses, behind torch's and vLLM's back."""
    import ctypes

    found = _tensors(worker)
    for name, tensor in hand_slices(*read_checkpoint(folder), layout, worker.rank).items():
        source = tensor.contiguous()
        assert found[name].is_contiguous()
        assert found[name].nbytes == source.nbytes
        ctypes.memmove(found[name].data_ptr(), source.data_ptr(), source.nbytes)


def _about(worker: Any) -> dict[str, Any]:
    from weight_sync_integrations.vllm import live, transfer

    model = worker.model_runner.get_model()
    found = live.inspect(model)
    return {
        "aliases": found.aliases,
        "not_writable": found.not_writable,
        "coords": transfer.coords(model, worker.vllm_config),
        "sizes": transfer.sizes(model, worker.vllm_config),
    }


def call(llm: Any, method: str, payload: dict[str, Any], token: str = TOKEN) -> list[dict[str, Any]]:
    request = json.dumps({"method": method, "payload": payload})
    return [json.loads(text) for text in llm.collective_rpc("weight_sync_call", args=(token, request))]


def rebuild(recording: dict[str, Any], hf: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Carry a recording out: the live tensors it says load_weights would make of `hf`."""
    import torch

    built = {name: torch.full_like(tensor, 7.0).contiguous() for name, tensor in like.items()}
    for constant in recording["constants"]:
        view = torch.as_strided(built[constant["param"]], constant["shape"], constant["strides"], constant["start"])
        view.fill_(constant["value"])
    for shard in recording["shards"]:
        view = torch.as_strided(built[shard["param"]], shard["shape"], shard["strides"], shard["start"])
        box = tuple(slice(o, o + n) for o, n in zip(shard["offset"], shard["shape"], strict=True))
        view.copy_(hf[shard["tensor"]][box])
    return built


def collect(layout: Layout, before: Path, after: Path) -> dict[str, Any]:
    """Everything the tests ask about one layout, from one engine."""
    import torch

    options: dict[str, Any] = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp}
    if layout.ep:
        options["enable_expert_parallel"] = True
    llm = build_engine(before, **options)
    facts: dict[str, Any] = {"about": llm.collective_rpc(_about)}
    facts["loaded"] = llm.collective_rpc(_differences, args=(before, layout))
    facts["tokens_before"] = greedy(llm)

    hf, config = read_checkpoint(before)
    shapes = {name: [list(tensor.shape), str(tensor.dtype)[6:]] for name, tensor in hf.items()}
    recordings = [reply["reply"] for reply in call(llm, "record", {"tensors": shapes})]
    facts["recordings"] = [
        {key: recording[key] for key in ("uncovered", "rewritten", "inexpressible", "unread")} for recording in recordings
    ]
    facts["shards"] = [recording["shards"] for recording in recordings]
    facts["rebuilt"] = []
    for rank, recording in enumerate(recordings):
        expected = hand_slices(hf, config, layout, rank)
        built = rebuild(recording, hf, expected)
        facts["rebuilt"].append([name for name in expected if not torch.equal(built[name], expected[name])])
    facts["after_recording"] = llm.collective_rpc(_differences, args=(before, layout))

    llm.collective_rpc(_write_raw, args=(after, layout))
    llm.reset_prefix_cache()
    facts["tokens_after"] = greedy(llm)

    facts["load_replies"] = call(llm, "load", {"path": str(before)})
    facts["loaded_back"] = llm.collective_rpc(_differences, args=(before, layout))
    call(llm, "load", {"path": str(after)})
    facts["loaded_after"] = llm.collective_rpc(_differences, args=(after, layout))
    llm.reset_prefix_cache()
    facts["tokens_loaded"] = greedy(llm)
    return facts


@pytest.fixture(scope="module")
def facts(checkpoints: Callable[..., Path], forked: Callable[..., Any]) -> Callable[[Layout], dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def of(layout: Layout) -> dict[str, Any]:
        if str(layout) not in known:
            folders = [checkpoints(layout.kind, seed=seed, **layout.sizes) for seed in (0, 1)]
            known[str(layout)] = forked(collect, layout, *folders)
        return known[str(layout)]

    return of


@pytest.fixture(scope="module")
def reference(checkpoints: Callable[..., Path], forked: Callable[..., Any]) -> Callable[[Layout, int], list[list[int]]]:
    known: dict[str, list[list[int]]] = {}

    def of(layout: Layout, seed: int) -> list[list[int]]:
        key = f"{layout.kind} {layout.sizes} {seed}"
        if key not in known:
            known[key] = forked(greedy_transformers, checkpoints(layout.kind, seed=seed, **layout.sizes))
        return known[key]

    return of


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@every_layout
def test_live_tensors_hold_exactly_the_slices_the_conventions_table_says(facts: Any, layout: Layout) -> None:
    assert facts(layout)["loaded"] == [[]] * (layout.tp * layout.pp)


@every_layout
def test_tokens_equal_transformers_before_and_after_weights_are_overwritten_in_place(
    facts: Any, reference: Any, layout: Layout
) -> None:
    assert facts(layout)["tokens_before"] == reference(layout, 0)
    assert facts(layout)["tokens_after"] == reference(layout, 1)
    assert reference(layout, 0) != reference(layout, 1)


@every_layout
def test_loading_a_folder_in_place_gives_the_bytes_and_tokens_of_that_checkpoint(
    facts: Any, reference: Any, layout: Layout
) -> None:
    world = layout.tp * layout.pp
    assert [reply["ok"] for reply in facts(layout)["load_replies"]] == [True] * world
    assert facts(layout)["loaded_back"] == [[]] * world
    assert facts(layout)["loaded_after"] == [[]] * world
    assert facts(layout)["tokens_loaded"] == reference(layout, 1)


@every_layout
def test_every_live_tensor_is_writable_and_tied_ones_are_listed_once(facts: Any, layout: Layout) -> None:
    about = facts(layout)["about"]
    assert [one["not_writable"] for one in about] == [{}] * len(about)
    for rank, one in enumerate(about):
        holds_head = layout.kind == "qwen3_moe" or rank // layout.tp == layout.pp - 1
        tied = layout.sizes.get("tie_word_embeddings") and holds_head
        other = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        if layout.kind == "qwen3_moe":  # the router is a child of the layer and of its experts
            layers = range(rank // layout.tp * 2, rank // layout.tp * 2 + 2) if layout.pp == 2 else range(4)
            own = [f"model.layers.{layer}.mlp." for layer in layers]
            other |= {f"{prefix}experts.gate.weight": f"{prefix}gate.weight" for prefix in own}
        assert one["aliases"] == other


@every_layout
def test_each_worker_knows_its_place_on_every_axis(facts: Any, layout: Layout) -> None:
    for rank, one in enumerate(facts(layout)["about"]):
        stage, tp = divmod(rank, layout.tp)
        expert = {"moe_ep": tp, "moe_tp": 0} if layout.ep else {"moe_ep": 0, "moe_tp": tp}
        assert one["coords"] == {"tp": tp, "pp": stage, "dp": 0, "attn_dp": 0, "attn_tp": tp, **expert}
        cut = {"moe_ep": layout.tp, "moe_tp": 1} if layout.ep else {"moe_ep": 1, "moe_tp": layout.tp}
        assert one["sizes"] == {
            "tp": layout.tp, "pp": layout.pp, "dp": 1, "attn_dp": 1, "attn_tp": layout.tp, **cut,
        }  # fmt: skip


@every_layout
def test_recorded_loading_explains_every_element_and_rebuilds_the_live_tensors(facts: Any, layout: Layout) -> None:
    for rank, recording in enumerate(facts(layout)["recordings"]):
        assert recording["uncovered"] == {}, rank
        assert recording["inexpressible"] == [], rank
        assert recording["rewritten"] == {}, rank
    unread = [set(recording["unread"]) for recording in facts(layout)["recordings"]]
    assert not set.intersection(*unread), "an HF tensor that no worker reads"
    assert facts(layout)["rebuilt"] == [[]] * (layout.tp * layout.pp)


@every_layout
def test_recording_changes_no_byte_of_the_live_engine(facts: Any, layout: Layout) -> None:
    assert facts(layout)["after_recording"] == [[]] * (layout.tp * layout.pp)


@every_layout
def test_the_layout_declared_for_vllm_is_what_its_loaders_do(
    facts: Any, checkpoints: Callable[..., Path], layout: Layout
) -> None:
    config = json.loads((checkpoints(layout.kind, seed=0, **layout.sizes) / "config.json").read_text())
    declared = Declared(
        family=family_yaml(layout.kind),
        config=config,
        dims={"tp": layout.tp, "pp": layout.pp, "moe_ep": layout.tp if layout.ep else 1},
        convention=engine_yaml("vllm"),
    )
    resolved = layout_of(declared, "rollout")
    for rank, shards in enumerate(facts(layout)["shards"]):
        agree(resolved, rank, shards, {})
