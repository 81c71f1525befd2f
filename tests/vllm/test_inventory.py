"""Weights besides the weights in real vLLM engines: a draft model beside the target, absorbed attention matrices, refusals.

Each engine is forked once and collects facts. Bytes are written in place by the worker itself, as a one-sided write would.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import model_of, rollout_layout

from tests.vllm.conftest import build_engine, greedy
from tests.vllm.test_live_weights import call
from weight_sync.layout.witness import agree

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
PLAIN_LATENT = {"attention_config": {"backend": "CPU_MLA"}}
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}


def _load_in_place(worker: Any, folder: str, drafts: bool) -> None:
    """Fill the live tensors from a checkpoint through the models' own loaders, in place."""
    import torch

    from weight_sync_integrations.vllm import tensors
    from weight_sync_integrations.vllm.worker import _checkpoint

    with torch.no_grad():
        for role, model in tensors.models_of(worker):
            if role == "target" or drafts:
                model.load_weights(_checkpoint(folder))


def _touch(worker: Any, name: str) -> None:
    from weight_sync_integrations.vllm import tensors

    found = {found.name: found.tensor for found in tensors.find_all(tensors.models_of(worker))}
    found[name].detach().view(-1)[-1] += 1


def _bound(llm: Any, expected: dict[str, Any], **payload: Any) -> Any:
    """bind with no transfers: what the inventory says of this engine is all that matters."""
    from weight_sync.transport.memory import MemoryHub, MemoryTransport
    from weight_sync_integrations.vllm import transport

    hub = MemoryHub()
    transport.open_transport = lambda: MemoryTransport(hub)
    table = {"plan": "p", "tensors": [], "params": [], "start": [], "strides": [], "shape": [], "stage_bytes": 0, "rounds": []}
    (reply,) = call(llm, "bind", {**table, "expected": expected, **payload})
    return reply


def _session(llm: Any, name: str, reply: dict[str, Any], write: Callable[[], None]) -> dict[str, Any]:
    call(llm, "begin", {"session": name, "version": 1, "plan": "p", "epoch": reply["reply"]["epoch"]})
    write()
    (answer,) = call(llm, "end", {"session": name})
    call(llm, "abort", {"session": name, "reason": "the next one"})
    return answer


def _with_draft(folders: tuple[Path, Path]) -> dict[str, Any]:
    first, second = folders
    llm = build_engine(first, **MTP)
    layouts = {d: rollout_layout(model_of(first), "vllm", {}, **({"draft": 1} if d else {})) for d in (False, True)}
    expected = {d: {p.name: [list(p.shape), p.dtype] for p in layout.rank_params(0)} for d, (layout, _) in layouts.items()}
    specs = {n: [list(p.shape), p.dtype] for p in layouts[True][0].catalog.patterns for n in p.names()}
    facts: dict[str, Any] = {"before": greedy(llm), "refuse": _bound(llm, expected[False])}
    facts["describe"] = call(llm, "describe", {})[0]["reply"]["drafts"]
    facts["record"] = call(llm, "record", {"tensors": specs, "draft": "sync"})[0]["reply"]

    frozen = {"draft": "frozen"}
    write = lambda drafts: lambda: llm.collective_rpc(_load_in_place, args=(str(second), drafts))  # noqa: E731
    touch = lambda: llm.collective_rpc(_touch, args=("draft.model.layers.2.enorm.weight",))  # noqa: E731
    facts["frozen"] = _session(llm, "s1", _bound(llm, expected[False], **frozen), write(False))
    facts["touched"] = _session(llm, "s2", _bound(llm, expected[False], **frozen), touch)
    facts["sync"] = _session(llm, "s3", _bound(llm, expected[True], draft="sync"), write(True))
    facts["entries"] = call(llm, "inventory", {"draft": "sync", "expected": list(expected[True])})[0]["reply"]["entries"]
    facts["after"] = greedy(llm)
    return facts


@pytest.fixture(scope="module")
def draft(checkpoints: Any, forked: Any) -> Any:
    folders = tuple(checkpoints("glm4_moe", seed=seed, num_hidden_layers=2) for seed in (0, 1))
    return forked(_with_draft, folders), folders


def test_a_draft_model_outside_the_plan_is_refused_by_name(draft: Any) -> None:
    facts, _ = draft
    assert facts["describe"] == ["draft"]
    assert facts["refuse"]["error"]["type"] == "BindError"
    message = facts["refuse"]["error"]["message"]
    assert "draft.model.layers.2.enorm.weight (parameter of RMSNorm)" in message
    assert "weight_sync.draft=sync writes it, =frozen declares" in message


def test_a_frozen_draft_model_is_proven_untouched_while_the_target_is_written(draft: Any) -> None:
    facts, _ = draft
    assert facts["frozen"]["reply"]["proven"]["frozen"] >= 18
    assert facts["touched"]["error"]["type"] == "VerifyError"
    assert "draft.model.layers.2.enorm.weight was declared frozen and has changed" in facts["touched"]["error"]["message"]


def test_a_synced_draft_model_is_declared_as_vllms_own_loader_fills_it(draft: Any) -> None:
    facts, (first, _) = draft
    layout, computed = rollout_layout(model_of(first), "vllm", {}, draft=1)
    recorded = facts["record"]
    unexplained = {entry["tensor"] or entry["param"]: entry["operation"] for entry in recorded["inexpressible"]}

    agree(layout, 0, recorded["shards"], unexplained, computed)

    assert (recorded["uncovered"], recorded["unread"]) == ({}, [])
    assert "frozen" not in facts["sync"]["reply"]["proven"]
    kept = Counter(entry["keep"] for entry in facts["entries"])
    assert set(kept) == {"synced", "alias", "constant", "state"}
    shared = {entry["name"] for entry in facts["entries"] if entry["keep"] == "alias"}
    assert {"draft.model.embed_tokens.weight", "draft.model.layers.2.shared_head.head.weight"} <= shared
    assert facts["after"] != facts["before"]


def _latent(folders: tuple[Path, Path]) -> dict[str, Any]:
    first, second = folders
    facts: dict[str, Any] = {}
    llm = build_engine(first, dtype="bfloat16", **PLAIN_LATENT)
    layout, _ = rollout_layout(model_of(first), "vllm", {})
    expected = {p.name: [list(p.shape), p.dtype] for p in layout.rank_params(0)}
    facts["old"] = greedy(llm)
    facts["views"] = [e for e in call(llm, "inventory", {})[0]["reply"]["entries"] if e["module"] == "MLAAttention"]
    write = lambda: llm.collective_rpc(_load_in_place, args=(str(second), False))  # noqa: E731
    facts["view session"] = _session(llm, "s1", _bound(llm, expected), write)
    facts["written"] = greedy(llm)
    llm.collective_rpc(_own_copies)
    facts["stale"] = greedy(llm)
    facts["copies"] = [e for e in call(llm, "inventory", {})[0]["reply"]["entries"] if e["module"] == "MLAAttention"]
    facts["copy session"] = _session(llm, "s2", _bound(llm, expected), lambda: None)
    facts["derived"] = greedy(llm)
    return facts


def _own_copies(worker: Any) -> None:
    """Give the absorbed matrices memory of their own, holding something else: as a quantised kv_b_proj makes them."""
    import torch

    for module in worker.model_runner.get_model().modules():
        if type(module).__name__ == "MLAAttention":
            for name in ("W_UV", "W_UK_T"):
                setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().clone() * 0.5, requires_grad=False))


def test_absorbed_matrices_follow_the_weights_as_views_or_are_recomputed_as_copies(checkpoints: Any, forked: Any) -> None:
    folders = tuple(checkpoints("deepseek_v3", seed=seed, dtype="bfloat16", **LATENT_SIZES) for seed in (0, 1))
    facts = forked(_latent, folders)

    absorbed = {
        leaf: {e["keep"] for e in facts[leaf] if e["name"].endswith(("W_UV", "W_UK_T"))} for leaf in ("views", "copies")
    }
    assert absorbed == {"views": {"alias"}, "copies": {"derived"}}
    assert facts["written"] != facts["old"]
    assert facts["stale"] != facts["written"]
    assert facts["copy session"]["reply"]["proven"]["derived"] == 4
    assert facts["derived"] == facts["written"]


# -- what cannot be synced at all --------------------------------------------------------------------------------------


def _worker(**changes: Any) -> Any:
    from types import SimpleNamespace as Bag

    import torch

    parallel = Bag(enable_eplb=changes.get("eplb", False), eplb_config=Bag(num_redundant_experts=4))
    offload = Bag(uva=Bag(cpu_offload_gb=changes.get("offload", 0)), prefetch=Bag(offload_group_size=changes.get("group", 0)))
    config = Bag(
        parallel_config=parallel,
        model_config=Bag(enable_sleep_mode=changes.get("sleep", False)),
        lora_config=changes.get("lora"),
        speculative_config=Bag(method=changes["draft"]) if "draft" in changes else None,
        offload_config=offload,
    )
    return Bag(vllm_config=config, model_runner=Bag(get_model=lambda: torch.nn.Linear(2, 2)), list_loras=lambda: {7})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eplb": True}, "enable_eplb (redundant experts: 4)"),
        ({"sleep": True}, "enable_sleep_mode: weights live in virtual memory"),
        ({"lora": object()}, "LoRA is enabled, adapters loaded: 7"),
        ({"draft": "medusa"}, "speculative_config method=medusa: this vLLM does not show its draft model"),
        ({"offload": 2}, "cpu_offload_gb=2"),
        ({"group": 2}, "offload_group_size=2"),
    ],
)
def test_an_engine_that_cannot_be_synced_says_which_setting_is_the_cause(changes: dict[str, Any], words: str) -> None:
    from weight_sync_integrations.vllm.tensors import refusals

    assert refusals(_worker()) == refusals(_worker(draft="ngram")) == []
    (found,) = refusals(_worker(**changes))
    assert words in found
