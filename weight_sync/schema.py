"""The config schemas: what Hydra checks when a config is composed. Plain dataclasses; docs/config.md lists every key.

kw_only, not frozen: OmegaConf fills them. config.py turns them into the frozen values that the library works with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING = "???"


class PauseChoice(Enum):
    """How engines stop generating; auto takes the first of retract, keep, abort that the engine offers."""

    auto = "auto"
    abort = "abort"
    retract = "retract"
    in_place = "in_place"
    wait = "wait"
    keep = "keep"


class VerifyLevel(Enum):
    """digest: a 64-bit digest of every transfer, source against live destination, on every sync."""

    digest = "digest"


class WandbMode(Enum):
    """auto: online when a login is found, offline otherwise."""

    auto = "auto"
    offline = "offline"
    online = "online"
    disabled = "disabled"


class MetricKeys(Enum):
    """Which framework's metric names are logged beside our own."""

    plain = "plain"
    verl = "verl"
    miles = "miles"


@dataclass(kw_only=True)
class TransportConf:
    """What moves the bytes. options: passed to the transport's constructor, see weight_sync/transport/<name>.py."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class VerifyConf:
    """witness: before the first sync, compare the declared layout with what the engine's own loader does."""

    level: VerifyLevel = VerifyLevel.digest
    witness: bool = True


@dataclass(kw_only=True)
class TimeoutsConf:
    """Seconds; see weight_sync.session.session.Timeouts."""

    connect: float = 300.0
    sync: float = 300.0
    abort: float = 60.0


@dataclass(kw_only=True)
class CostsConf:
    """What a message and a byte cost on this transport: decides what is packed. seconds, bytes/s, bytes/s."""

    seconds_per_write: float = 31e-6
    wire: float = 2.0e9
    copy: float = 3.0e9


@dataclass(kw_only=True)
class BudgetConf:
    """Bytes of staging beside the weights, on each trainer rank and each engine worker."""

    source: int = 64 << 20
    target: int = 64 << 20


@dataclass(kw_only=True)
class ObserveConf:
    """keys: metric names beside weight_sync/*. limit: bytes/s of the wire, for the share-of-limit column; null: unknown."""

    wandb: WandbMode = WandbMode.offline
    project: str = "weight_sync"
    keys: MetricKeys = MetricKeys.plain
    limit: float | None = None


@dataclass(kw_only=True)
class SyncConf:
    """The group `weight_sync`: one strategy. strategy: its name, equal to the file's. preflight: what must be there."""

    strategy: str = MISSING
    family: str = "auto"
    transport: TransportConf = field(default_factory=TransportConf)
    verify: VerifyConf = field(default_factory=VerifyConf)
    pause: PauseChoice = PauseChoice.auto
    timeouts: TimeoutsConf = field(default_factory=TimeoutsConf)
    costs: CostsConf = field(default_factory=CostsConf)
    budget: BudgetConf = field(default_factory=BudgetConf)
    observe: ObserveConf = field(default_factory=ObserveConf)


@dataclass(kw_only=True)
class PlacementConf:
    """Where Ray puts a role's processes: what each process takes. resources: Ray custom resources, {"trainer_node": 0.01}."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainerConf:
    """The trainer side. kind: megatron or fsdp2. python: interpreter of its environment. dp follows from ranks.

    vocab_multiple: Megatron pads the vocabulary to a multiple of this times tp (make_vocab_size_divisible_by).
    pipeline: layers of each virtual stage. optimizer: distributed or replicated (megatron).
    """

    kind: str = MISSING
    python: str = MISSING
    ranks: int = 4
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    pipeline: list[int] | None = None
    order: str = "tp-cp-ep-dp-pp"
    vocab_multiple: int = 128
    optimizer: str = "distributed"
    learning_rate: float = 0.01
    dtype: str | None = None
    placement: PlacementConf = field(default_factory=PlacementConf)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class RolloutConf:
    """The rollout side: `engines` servers of tp * pp workers. kind: sglang or vllm.

    start_seconds: until a server must be ready. pipeline: layers of each stage; null: the engine's own rule. host: address to
    bind to; auto: the node's. options: more fields of the server's spec (integrations/<kind>/launch.py, ServerSpec).
    arguments: more of the server's own command-line arguments.
    """

    kind: str = MISSING
    python: str = MISSING
    engines: int = 1
    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    moe_ep: int = 1
    pipeline: list[int] | None = None
    device: str = "cpu"
    dtype: str | None = None
    host: str = "127.0.0.1"
    start_seconds: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    placement: PlacementConf = field(default_factory=PlacementConf)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelConf:
    """path: a HF checkpoint folder; null: make a tiny random one of `kind` and `dtype` with `sizes` on the spot."""

    path: str | None = None
    kind: str = "qwen3_moe"
    seed: int = 0
    dtype: str = "bfloat16"
    sizes: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RayConf:
    """address: of a running cluster ("auto", "host:port"); null starts Ray on this machine with `num_cpus` logical CPUs."""

    address: str | None = None
    num_cpus: int = 32


@dataclass(kw_only=True)
class JobConf:
    """The stand-alone job of train.py: rounds of {optimizer steps, sync, generate, check}."""

    weight_sync: Any = None
    trainer: TrainerConf = field(default_factory=TrainerConf)
    rollout: RolloutConf = field(default_factory=RolloutConf)
    model: ModelConf = field(default_factory=ModelConf)
    ray: RayConf = field(default_factory=RayConf)
    rounds: int = 3
    steps_per_round: int = 1
    prompts: list[list[int]] = field(default_factory=lambda: [[3, 14, 15, 92, 65], [27, 18, 28, 182]])
    max_new_tokens: int = 16
    check_tokens: bool = True
    output_dir: str = "outputs"
