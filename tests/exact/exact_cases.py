"""What is synced to what: models, trainer layouts, engine layouts, and how pieces may travel. No heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weight_sync.plan.schedule import Budget, CostModel

TRAINER_WORLD = 4


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint: kind and sizes as make_checkpoint() takes them.

    named: its family, where that is not the kind. still: endings of the tensors that an optimiser step leaves as they are.
    symbols: of the rollout's layout, by kind of engine.
    """

    kind: str
    sizes: Mapping[str, Any]
    named: str = ""
    still: tuple[str, ...] = ()
    symbols: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.named or self.kind


@dataclass(frozen=True)
class Trainer:
    """A real trainer of TRAINER_WORLD ranks. parallel: sizes by axis; dp follows. options: more arguments of build()."""

    model: str
    parallel: Mapping[str, int]
    fsdp: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """Parallel sizes of a rollout: `engines` engines of tp * pp workers."""

    tp: int = 1
    pp: int = 1
    moe_ep: int = 1
    attn_dp: int = 1
    engines: int = 1

    def dims(self, remainder: str) -> dict[str, Any]:
        """Arguments of EngineDims. remainder: where layers go that do not divide over the stages."""
        own = {name: getattr(self, name) for name in ("tp", "pp", "moe_ep", "attn_dp", "engines")}
        return {**own, "remainder": remainder}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
_SIX = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 384, "num_hidden_layers": 2}

# Vocabularies that need padding on every side; three layers so that two stages are not equal.
MODELS = {
    "moe": Model("qwen3_moe", {"vocab_size": 250}),
    "dense": Model("qwen3", {"vocab_size": 200, "num_hidden_layers": 3}),
    "tied": Model("qwen3", {"vocab_size": 200, "tie_word_embeddings": True}),
    # 380 rows pad to 384, which three ranks divide; 300 to 320, which they do not: SGLang then pads further, vLLM gives up.
    "six heads": Model("qwen3", {**_SIX, "vocab_size": 380}),
    "six heads, odd": Model("qwen3", {**_SIX, "vocab_size": 300}),
    # Both engines hold some of these in float32: a trained bfloat16 router (GLM-4.5), norms of the indexer (GLM-5).
    "glm45": Model("glm4_moe", {"vocab_size": 250, "num_hidden_layers": 2}, "glm45", still=("e_score_correction_bias",)),
    "glm5": Model(  # no MTP layer: Megatron-Bridge trains and exports none; SGLang's CPU kernels know no other rope with MLA
        "glm_moe_dsa",
        {
            "vocab_size": 250,
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 0,
            "rope_parameters": _YARN,
            "num_experts": 8,  # the trainer's transformers keeps a second count, which the engines' newer ones read
        },
        "glm5",
        symbols={"sglang": {"indexer_fused": 0}},  # without CUDA
    ),
    "llama": Model("llama", {"vocab_size": 250, "num_hidden_layers": 2}),
    "qwen2": Model("qwen2", {"vocab_size": 250, "num_hidden_layers": 2}),
    "deepseek": Model(  # rope as of GLM-5
        "deepseek_v3",
        {"vocab_size": 250, "num_hidden_layers": 2, "rope_parameters": _YARN},
        "deepseek_v3",
        still=("e_score_correction_bias",),
    ),
    "flash": Model(  # no MTP layer: Megatron-Bridge exports a copy of the embedding with it, which checkpoints do not have
        "glm4_moe_lite",
        {"vocab_size": 250, "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "rope_parameters": _YARN},
        "glm47_flash",
        still=("e_score_correction_bias",),
    ),
    "undeclared": Model("phi3", {"vocab_size": 200, "num_hidden_layers": 2}),  # no family knows it
}

TRAINERS = {
    "moe tp2 pp2 ep2": Trainer("moe", {"tp": 2, "pp": 2, "ep": 2}),
    # dp 2 whose parameters are stale after the step until quiesce() gathers them
    "moe tp2 ep2 etp2 dp2": Trainer("moe", {"tp": 2, "ep": 2, "etp": 2}, options={"overlap_param_gather": True}),
    "moe pp2 vpp2 ep2 dp2": Trainer("moe", {"pp": 2, "vpp": 2, "ep": 2}),
    "moe fsdp2": Trainer("moe", {}, fsdp=True),
    "dense tp4": Trainer("dense", {"tp": 4}),  # two KV heads: tp cuts inside a KV group
    "tied tp2 pp2": Trainer("tied", {"tp": 2, "pp": 2}),  # a second copy of the embedding on the last stage
    "tied fsdp2": Trainer("tied", {}, fsdp=True),
    "six heads tp2 dp2": Trainer("six heads", {"tp": 2}, options={"optimizer": "replicated"}),
    "six heads, odd tp2 dp2": Trainer("six heads, odd", {"tp": 2}),
    "glm45 tp2 pp2 ep2": Trainer("glm45", {"tp": 2, "pp": 2, "ep": 2}),
    "glm5 pp2 ep2 dp2": Trainer("glm5", {"pp": 2, "ep": 2}),
    "undeclared fsdp2": Trainer("undeclared", {}, fsdp=True),
    "llama tp2 pp2": Trainer("llama", {"tp": 2, "pp": 2}),
    "qwen2 tp2 pp2": Trainer("qwen2", {"tp": 2, "pp": 2}),
    "deepseek tp2 pp2 ep2": Trainer("deepseek", {"tp": 2, "pp": 2, "ep": 2}),
    "flash tp2 ep2 dp2": Trainer("flash", {"tp": 2, "ep": 2}),
    # all parameters in float32, the engine's in bfloat16
    "llama float32 tp2 dp2": Trainer("llama", {"tp": 2}, options={"dtype": "float32"}),
    "moe float32 fsdp2": Trainer("moe", {}, fsdp=True, options={"dtype": "float32"}),
}

ENGINES = {
    "tp1": Engine(),
    "tp2": Engine(tp=2),
    "tp2ep2": Engine(tp=2, moe_ep=2),
    "pp2": Engine(pp=2),
    "tp3": Engine(tp=3),  # against a trainer of tp 2, row-parallel pieces are whole on neither side
    "tp4ep2": Engine(tp=4, moe_ep=2),  # KV heads replicated, experts spread and cut
    "tp2pp2": Engine(tp=2, pp=2),
    "tp2 attn-dp2": Engine(tp=2, attn_dp=2),
    "2 x tp2": Engine(tp=2, engines=2),
}

WAYS: dict[str, tuple[CostModel, Budget]] = {
    "runs": (CostModel(seconds_per_write=0.0), Budget()),  # messages cost nothing: every run is written by itself
    "default": (CostModel(), Budget()),
    # Messages cost everything: whatever has two runs is packed or unpacked, through a buffer far smaller than the model.
    "staged": (CostModel(seconds_per_write=1.0), Budget(source=16 << 10, target=16 << 10)),
    # The engine's layout is recorded instead of declared, and with FSDP the HF tensors are those that its ranks publish.
    "recorded": (CostModel(), Budget()),
}

KINDS = ("sglang", "vllm")

_EVERYWHERE = ("tp1", "tp2", "tp2ep2", "pp2")
_ONCE = (
    ("six heads tp2 dp2", "tp3"),
    ("six heads, odd tp2 dp2", "tp3"),
    ("moe tp2 pp2 ep2", "tp4ep2"),
    ("moe tp2 ep2 etp2 dp2", "tp2 attn-dp2"),
    ("moe pp2 vpp2 ep2 dp2", "2 x tp2"),
    ("dense tp4", "tp2pp2"),
    ("tied tp2 pp2", "tp2pp2"),
    ("glm45 tp2 pp2 ep2", "tp2ep2"),
    ("glm5 pp2 ep2 dp2", "tp2"),
)

ONE_WAY = (
    ("llama tp2 pp2", "tp2"),
    ("qwen2 tp2 pp2", "tp2"),
    ("deepseek tp2 pp2 ep2", "tp2ep2"),
    ("flash tp2 ep2 dp2", "tp2"),
    ("llama float32 tp2 dp2", "tp2"),
    ("moe float32 fsdp2", "tp2"),
)
"""(trainer, engine) that are synced once, in the default way: families and casts, not ways of travelling."""

_APART = [trainer for trainer, _ in ONE_WAY]
PAIRS = (
    *(
        (trainer, engine)
        for engine in _EVERYWHERE
        for trainer, case in TRAINERS.items()
        if trainer not in _APART
        and not case.model.startswith(("six", "undeclared", "glm"))
        and (case.model == "moe" or engine != "tp2ep2")
    ),
    *_ONCE,
)
"""(trainer, engine) names that are synced."""


RECORDED = (
    ("undeclared fsdp2", "tp2"),
    ("tied fsdp2", "tp2"),
    ("moe pp2 vpp2 ep2 dp2", "tp2ep2"),
    ("tied tp2 pp2", "pp2"),
)
"""(trainer, engine) that are synced to a recorded engine layout."""


QUANTS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"block": (32, 32)},
    "fp8 blocks, powers of two": {"block": (32, 32), "ue8m0": True},
}
"""How the checkpoint that engines serve is quantised: arguments of fp8_config(). Trainers hold bfloat16."""

_BLOCKS = tuple(
    ("fp8 blocks", trainer, engine)
    for trainer in ("moe tp2 pp2 ep2", "deepseek tp2 pp2 ep2", "glm45 tp2 pp2 ep2")
    for engine in ("tp1", "tp2", "tp2ep2")
)
QUANTISED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "sglang": (
        ("fp8 blocks", "moe fsdp2", "tp2ep2"),  # its cuts lie inside blocks
        ("fp8 blocks, powers of two", "deepseek tp2 pp2 ep2", "tp2"),
    ),
    "vllm": (),
}
"""Kind of engine -> (quantisation, trainer, engine) that are synced once, in the default way, beside those of _BLOCKS."""

RANKS_ONLY = ("glm5", "deepseek", "flash", "llama", "qwen2")
"""Models whose vLLM ranks are built and loaded, but no engine runs them: vLLM has no CPU kernels for the attention of the first
three, and engines of the others would take the time of ten ranks. Of quantised checkpoints one runs in vLLM's own workers."""


def runs(kind: str, model: str, engine: str, quant: str) -> bool:
    """Whether an engine of this kind runs in its own workers, instead of rank by rank in one process."""
    return kind == "vllm" and (model not in RANKS_ONLY if not quant else (model, engine) == ("moe", "tp2ep2"))


def why_not(kind: str, trainer: str, engine: str) -> str | None:
    """Why a kind of engine cannot have this layout here, or None."""
    case = ENGINES[engine]
    if kind != "vllm":
        return None
    if case.moe_ep not in (1, case.tp):
        return "vLLM spreads experts over all tensor ranks or cuts them all: moe_ep is 1 or tp"
    if case.attn_dp > 1:
        return "vLLM has no attention data parallelism inside tp"
    if case.engines > 1:
        return "vLLM keeps parallel state in globals: one engine fills a process"
    if "odd" in trainer:
        return "vLLM pads a vocabulary to a multiple of 64 only, and refuses 320 rows on three ranks"
    if engine == "tp2pp2":
        return "four vLLM workers beside the tests of two cores take too long; tp2 and pp2 are run by themselves"
    return None


@dataclass(frozen=True)
class Mutation:
    """A wrong declaration that changes no shape. side: whose rules. seen: whether the engine's own loader contradicts it.

    wrong: what the names of the engine's parameters that get wrong bytes end in.
    """

    side: str
    seen: bool
    wrong: str

    def apply(self, name: str, family: dict[str, Any], convention: dict[str, Any]) -> None:
        """Change the merged YAML of a family or of an engine in place."""
        rules = family["mcore"] if self.side == "trainer" else convention["rules"]
        if name.endswith("gate and up swapped"):
            rules["experts_in"]["parts"].reverse()
        elif name == "engine: k and v swapped":
            parts = rules["qkv"]["parts"]
            parts[1], parts[2] = parts[2], parts[1]
        elif name == "trainer: qkv not interleaved":
            own = rules["qkv"]
            rules["qkv"] = {
                "rule": "concat",
                "parts": [own["q"], own["k"], own["v"]],
                "param": own["param"],
                "place": own["place"],
            }
        else:
            raise ValueError(name)


MUTATIONS = {
    "engine: gate and up swapped": Mutation("rollout", True, "w13_weight"),
    "engine: k and v swapped": Mutation("rollout", True, "qkv_proj.weight"),
    "trainer: gate and up swapped": Mutation("trainer", False, "w13_weight"),
    "trainer: qkv not interleaved": Mutation("trainer", False, "qkv_proj.weight"),
}
METHODS = {
    "pack": ("moe pp2 vpp2 ep2 dp2", "tp2"),
    "unpack": ("moe tp2 ep2 etp2 dp2", "tp1"),
    "both": ("six heads tp2 dp2", "tp3"),
}
"""The (trainer, engine) that make pieces travel in this way where messages are dear; where they are free nothing is packed."""

CASTS = {
    "glm45 tp2 pp2 ep2": ("mlp.gate.weight",),
    "glm5 pp2 ep2 dp2": ("indexer.k_norm.weight", "indexer.k_norm.bias"),
    "flash tp2 ep2 dp2": ("mlp.gate.weight",),
    "llama float32 tp2 dp2": (".weight",),
    "moe float32 fsdp2": (".weight",),
}
"""Trainer -> endings of the HF tensors that a sync of it casts."""

MUTATED = ("moe pp2 vpp2 ep2 dp2", "tp2ep2")
"""The (trainer, engine) that mutations are tried on: tp 1, so that a rank holds several KV groups to get wrong."""


def all_cases() -> list[dict[str, str]]:
    """Every case of every kind of engine: {"id", "kind", "trainer", "engine", "way" or "mutation"}, some with "quant"."""
    cases = [
        {"kind": kind, "trainer": trainer, "engine": engine, "way": way}
        for kind in KINDS
        for trainer, engine in PAIRS
        for way in WAYS
        if way != "recorded" and (way != "runs" or (trainer, engine) in METHODS.values())
    ]
    cases += [
        {"kind": kind, "trainer": trainer, "engine": engine, "way": way}
        for kind in KINDS
        for way, pairs in (("default", ONE_WAY), ("recorded", RECORDED))
        for trainer, engine in pairs
    ]
    cases += [
        {"kind": kind, "trainer": trainer, "engine": engine, "way": "default", "quant": quant}
        for kind in KINDS
        for quant, trainer, engine in (*_BLOCKS, *QUANTISED[kind])
    ]
    trainer, engine = MUTATED
    cases += [{"kind": kind, "trainer": trainer, "engine": engine, "mutation": name} for kind in KINDS for name in MUTATIONS]
    for case in cases:
        case["id"] = "/".join(case.values())
    return cases
