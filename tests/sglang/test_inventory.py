"""Every tensor in one class: the walk and the proofs on small modules, then on SGLang's own models and draft models."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import model_of, rollout_layout

from weight_sync.errors import BindError, ConfigError, FamilyError, VerifyError
from weight_sync.layout.witness import agree
from weight_sync_integrations.inventory import Found, Inventory, Policy, Rule, find
from weight_sync_integrations.recorder_roles import record_roles
from weight_sync_integrations.sglang import tensors as known
from weight_sync_integrations.sglang.replica import EngineSizes, build_replica, read_checkpoint

Make = Callable[..., Path]
RULES = (
    Rule("derived", "Base.made*", "made from weight"),
    Rule("constant", "Base.table", "a table"),
    Rule("state", "Base.cache*", "a cache"),
)
MAIN = __name__.split(".")[0]


class Base(torch.nn.Module):
    """A module with one tensor of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3))
        self.register_buffer("bias", torch.randn(4))
        self.register_buffer("table", torch.randn(8), persistent=False)
        self.view = self.weight.detach().t()[1:]
        self.made = self.weight.detach() * 2
        self.cache = {"kv": torch.zeros(6)}

    def derive(self) -> None:
        self.made = self.weight.detach() * 2


class Sub(Base):
    """Rules for a class hold for what is derived from it."""


class Helper:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Lazy:
    """Stands for a list, of which it says that it is one."""

    def __init__(self, inside: list[Any]) -> None:
        self._iter = inside.__iter__

    __module__ = "elsewhere"  # so that its attributes are not looked into
    __class__ = property(lambda self: list)  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return self._iter()


def inventory(model: torch.nn.Module, **policy: Any) -> Inventory:
    planned = [model.weight, model.bias]  # type: ignore[list-item] - tensors of Base
    values = {"rules": RULES, "recomputes": "by derive()"} | policy
    return Inventory(lambda: find([("target", model)], (MAIN,), frozenset()), planned, Policy(**values), "rollout rank 3")


def classes(made: Inventory) -> dict[str, str | None]:
    return {entry.name: entry.keep for entry in made.entries}


def test_each_kind_of_tensor_is_found_once_and_put_into_its_class() -> None:
    made = inventory(Sub())

    assert classes(made) == {
        "weight": "synced", "bias": "synced", "table": "constant", "view": "alias", "made": "derived", "cache.kv": "state",
    }  # fmt: skip
    assert {entry.kind for entry in made.entries} == {"parameter", "buffer", "scratch buffer", "attribute"}
    made.require_all()


@pytest.mark.parametrize(
    "hide",
    [
        lambda t: t,
        lambda t: [{"a": (t,)}],
        lambda t: functools.partial(print, t),
        lambda t: lambda: t,
        lambda t: Helper(t),
        lambda t: Helper([t]).__init__,
        lambda t: [torch.nn.ParameterList([t])],
        lambda t: OrderedDict(a=Lazy([t])),
    ],
    ids=["plain", "containers", "partial", "closure", "slots", "method", "module in a list", "stand-in for a list"],
)
def test_a_tensor_that_no_rule_knows_is_refused_wherever_it_hides(hide: Callable[[torch.Tensor], Any]) -> None:
    model = Base()
    model.odd = hide(torch.ones(2))

    with pytest.raises(
        BindError, match=r"rollout rank 3: 1 tensors .*\bodd\S* \(\w+ of (Base|ParameterList)\).*weight_sync\.declare"
    ):
        inventory(model).require_all()
    model.odd = hide(model.weight.detach()[0])  # the same place, but in memory that the plan writes
    inventory(model).require_all()


def test_a_parameter_outside_the_plan_is_refused_and_a_declaration_by_name_makes_it_legal() -> None:
    model = Base()
    model.late = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(BindError, match=r"late \(parameter of Base\): the plan does not write it"):
        inventory(model).require_all()

    made = inventory(model, declare={"la*": "constant"})
    made.require_all()

    assert classes(made)["late"] == "constant"
    with pytest.raises(ConfigError, match="'synced' must be one of derived, constant, state"):
        inventory(model, declare={"late": "synced"})


def test_a_derived_tensor_is_refused_where_nothing_would_recompute_it() -> None:
    with pytest.raises(BindError, match=r"made \(attribute of Base\): it is derived from weights, and this server has no call"):
        inventory(Base(), recomputes=None).require_all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.table.mul_(2), "table was declared constant and has changed"),
        (lambda m: m.table.view(-1)[7:].copy_(m.table[6:7]), "table was declared constant and has changed"),
        (lambda m: setattr(m, "table", m.table.clone()[:7]), "table was declared constant and has changed"),
        (lambda m: delattr(m, "table"), "table is gone"),
        (lambda m: setattr(m, "late", torch.ones(3)), "late appeared since bind, and is unaccounted"),
        (lambda m: None, ""),
        (lambda m: setattr(m, "cache", {"kv": torch.ones(9), "more": torch.ones(2)}), ""),  # working memory may come and go
        (lambda m: setattr(m, "table", m.table.to(torch.bfloat16)), ""),  # engines cast their tables at the first request
    ],
)
def test_constants_are_proven_when_the_sync_is_finished(change: Callable[[Any], Any], complaint: str) -> None:
    model = Base()
    made = inventory(model)
    made.seal()
    made.spoil()
    with torch.no_grad():
        change(model)
        model.derive()

    if complaint:
        with pytest.raises(VerifyError, match=complaint):
            made.check()
    else:
        assert made.check() == {"constant": 1, "derived": 1}


def test_a_derived_tensor_that_is_recomputed_in_part_or_not_at_all_is_found() -> None:
    model = Base()
    made = inventory(model)
    made.seal()
    made.spoil()
    with pytest.raises(VerifyError, match="made was not recomputed from the new weights"):
        made.check()
    model.made[:3] = model.weight.detach()[:3] * 2
    with pytest.raises(VerifyError, match="made was not recomputed"):
        made.check()
    model.derive()
    made.check()


# -- SGLang's own models -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latent(checkpoint: Make) -> tuple[Path, Path]:
    """DeepSeek-V3 as the target and as its NextN draft. SGLang's CPU mode wants a rope scaling."""
    scaling = {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    target = checkpoint("deepseek_v3", num_hidden_layers=2, rope_parameters=scaling)
    return target, draft_of(target, "DeepseekV3ForCausalLMNextN")


def draft_of(target: Path, architecture: str) -> Path:
    folder = target.parent / f"{target.name}-draft"
    shutil.copytree(target, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(path: Path, weights: Path) -> torch.nn.Module:
    replica = build_replica(path, 0)
    replica.load(read_checkpoint(weights))
    return replica.model


def judged(models: list[tuple[str, torch.nn.Module]], **policy: Any) -> Inventory:
    planned = known.live_tensors(models[:1]).values()
    values = {"rules": known.RULES, "recomputes": known.RECOMPUTES} | policy
    return Inventory(lambda: known.find_all(models), planned, Policy(**values), "rollout rank 0")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"])
def test_every_tensor_of_these_models_is_accounted_for(checkpoint: Make, kind: str) -> None:
    made = judged([("target", build_replica(checkpoint(kind, num_hidden_layers=2), 0).model)])

    made.require_all()
    assert set(classes(made).values()) <= {"synced", "alias", "constant"}


def test_absorbed_matrices_are_derived_and_really_recomputed_from_what_was_written(
    latent: tuple[Path, Path], checkpoint: Make
) -> None:
    model = loaded(latent[0], latent[0])
    made = judged([("target", model)])
    made.require_all()
    assert Counter(entry.name.rpartition(".")[2] for entry in made.entries if entry.keep == "derived") == {"w_kc": 2, "w_vc": 2}
    made.seal()
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.kv_b_proj.weight.mul_(0.5)  # as a one-sided write would
    before = attention.w_kc.clone()
    made.spoil()
    with pytest.raises(VerifyError, match=r"self_attn\.w_kc was not recomputed"):
        made.check()

    model.post_load_weights()

    assert made.check()["derived"] == 4
    assert torch.equal(attention.w_kc, before * 0.5)


def nextn(latent: tuple[Path, Path]) -> list[tuple[str, torch.nn.Module]]:
    target, draft = loaded(latent[0], latent[0]), loaded(latent[1], latent[0])
    draft.model.embed_tokens.weight, draft.lm_head.weight = target.model.embed_tokens.weight, target.lm_head.weight
    return [("target", target), ("draft", draft)]


def test_a_draft_model_outside_the_plan_is_refused_with_what_would_be_legal(latent: tuple[Path, Path]) -> None:
    with pytest.raises(BindError, match=r"draft\.model\.enorm\.weight.*weight_sync\.draft=sync writes it, =frozen"):
        judged(nextn(latent)).require_all()


def test_a_frozen_draft_model_is_proven_untouched_and_shares_the_targets_embedding(latent: tuple[Path, Path]) -> None:
    models = nextn(latent)
    made = judged(models, draft="frozen")
    made.require_all()
    found = classes(made)
    assert found["draft.model.embed_tokens.weight"] == found["draft.lm_head.weight"] == "alias"
    assert found["draft.model.eh_proj.weight"] == found["draft.model.decoder.self_attn.w_kc"] == "frozen"
    made.seal()
    made.spoil()
    for _, model in models:
        model.post_load_weights()  # /end_weight_update runs it for the draft, too
    with torch.no_grad():
        models[0][1].model.embed_tokens.weight.mul_(2)  # written by the plan, also under the draft's name
    assert made.check()["frozen"] > 15

    with torch.no_grad():
        models[1][1].model.enorm.weight[3] += 1
    with pytest.raises(VerifyError, match=r"draft\.model\.enorm\.weight was declared frozen and has changed"):
        made.check()


@pytest.mark.parametrize(
    ("kind", "architecture"), [("deepseek_v3", "DeepseekV3ForCausalLMNextN"), ("glm4_moe", "Glm4MoeForCausalLMNextN")]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_declared_layout_of_a_synced_draft_model_is_what_sglangs_own_loaders_do(
    checkpoint: Make, latent: tuple[Path, Path], kind: str, architecture: str, tp: int
) -> None:
    target = latent[0] if kind == "deepseek_v3" else checkpoint(kind, num_hidden_layers=2)
    tensors, sizes = read_checkpoint(target), EngineSizes(tp=tp)
    layout, computed = rollout_layout(model_of(target), "sglang", {"tp": tp}, draft=1)
    for rank in range(tp):
        models = []
        for role, folder in (("target", target), ("draft", draft_of(target, architecture))):
            replica = build_replica(folder, rank, sizes)
            models.append((role, replica.model))
        (_, served), (_, draft) = models
        draft.model.embed_tokens.weight, draft.lm_head.weight = served.model.embed_tokens.weight, served.lm_head.weight
        with replica.scope():
            seen = record_roles(models, tensors, known.loader)
        unexplained = {entry["tensor"] or entry["param"]: entry["operation"] for entry in seen.inexpressible}
        agree(layout, rank, seen.shards, unexplained, computed)
        assert seen.unread == []
        live = known.live_tensors(models)
        assert set(live) == {param.name for param in layout.rank_params(rank)}
        values = {"rules": known.RULES, "recomputes": known.RECOMPUTES, "draft": "sync"}
        made = Inventory(lambda models=models: known.find_all(models), live.values(), Policy(**values), "rollout rank 0")
        made.require_all()


@pytest.mark.parametrize(
    ("kind", "parallel", "words"), [("qwen3", {}, "no MTP layer"), ("glm4_moe", {"pp": 2}, "was not tried")]
)
def test_a_draft_model_that_cannot_be_synced_is_refused_by_the_layout(
    checkpoint: Make, kind: str, parallel: dict[str, int], words: str
) -> None:
    with pytest.raises(FamilyError, match=words):
        rollout_layout(model_of(checkpoint(kind, num_hidden_layers=2)), "sglang", parallel, draft=1)


# -- what cannot be synced at all --------------------------------------------------------------------------------------


def scheduler(**arguments: Any) -> Any:
    lora = arguments.pop("lora", None)
    saver = SimpleNamespace(enabled=arguments.pop("saver", False))
    runner = SimpleNamespace(model=torch.nn.Linear(2, 2), lora_manager=lora)
    return SimpleNamespace(
        device="cpu",
        server_args=SimpleNamespace(**arguments),
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        memory_saver_adapter=saver,
        weight_updater=SimpleNamespace(offload_tags=set(arguments.pop("released", ()))),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_eplb": True, "ep_num_redundant_experts": 4}, "enable_eplb=True, ep_num_redundant_experts=4: experts"),
        ({"init_expert_location": "/a/map.json"}, "init_expert_location=/a/map.json: experts"),
        ({"saver": True}, "enable_memory_saver: weights live in virtual memory"),
        ({"released": ["weights"]}, "has released weights"),
        ({"weight_cache_mode": "attach"}, "weight_cache_mode=attach"),
        ({"cpu_offload_gb": 2}, "cpu_offload_gb=2"),
        ({"tp_size": 4, "moe_dense_tp_size": 1}, "moe_dense_tp_size=1 with tp_size=4: dense layers and shared experts"),
        ({"tp_size": 4, "attn_dp_size": 2, "enable_dp_lm_head": True}, "enable_dp_lm_head=True with attn_dp_size=2: the head"),
        ({"hicache_storage_backend": "mooncake"}, "hicache_storage_backend=mooncake keeps KV of old weights"),
        (
            {"lora": SimpleNamespace(lora_refs={"1": SimpleNamespace(lora_name="math", lora_id="1")})},
            "LoRA is enabled, adapters loaded: math",
        ),
    ],
)
def test_an_engine_that_cannot_be_synced_says_which_argument_is_the_cause(arguments: dict[str, Any], words: str) -> None:
    (found,) = known.refusals(scheduler(**arguments))
    assert words in found


def test_a_plain_engine_has_nothing_to_refuse() -> None:
    assert known.refusals(scheduler()) == []


def test_arguments_that_cut_nothing_otherwise_are_not_refused() -> None:
    same = {"tp_size": 4, "moe_dense_tp_size": 4, "attn_dp_size": 1, "enable_dp_lm_head": True}
    assert known.refusals(scheduler(**same)) == []


def test_the_arguments_that_are_looked_for_are_those_of_the_installed_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    names = {"tp_size", "attn_dp_size", "moe_dense_tp_size", "enable_dp_lm_head", "enable_eplb", "ep_num_redundant_experts"}
    assert names <= set(dir(ServerArgs))


def test_a_map_of_experts_that_is_not_the_identity_is_found_on_the_live_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.eplb import expert_location

    def places(rows: list[list[int]], logical: int) -> Any:
        return lambda: SimpleNamespace(
            physical_to_logical_map_cpu=torch.tensor(rows), num_physical_experts=len(rows[0]), num_logical_experts=logical
        )

    for rows, logical, right in (([[0, 1, 2]] * 2, 3, True), ([[0, 1, 2], [0, 2, 1]], 3, False), ([[0, 1, 2]], 2, False)):
        monkeypatch.setattr(expert_location, "get_global_expert_location_metadata", places(rows, logical))
        assert (known.refusals(scheduler()) == []) is right


def test_only_tensor_findings_carry_the_role_of_a_draft(latent: tuple[Path, Path]) -> None:
    found: list[Found] = list(known.find_all(nextn(latent)))
    assert {f.role for f in found if f.name.startswith("draft.")} == {"draft"}
    assert {f.role for f in found if not f.name.startswith("draft.")} == {"target"}
