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


class DraftChoice(Enum):
    """A draft model (MTP) beside the served one: refuse: an error; frozen: keeps its weights, proven; sync: written, too."""

    refuse = "refuse"
    frozen = "frozen"
    sync = "sync"


class VerifyLevel(Enum):
    """What is compared on every sync before it may be committed; weight_sync/session/verify.py says what each costs.

    off: nothing (warned of on every sync, reported as not verified; in a YAML file "off" needs its quotes). digest: a 64-bit
    digest of every transfer, source against live destination. full: digest, and every byte read back. check_weight_equal:
    digest, and snapshot, scramble, write again, compare.
    """

    off = "off"
    digest = "digest"
    full = "full"
    check_weight_equal = "check_weight_equal"


class EngineLayout(Enum):
    """auto: the engine's declared convention (conf/weight_sync/engine). recorded: what the live engine's own loader does."""

    auto = "auto"
    recorded = "recorded"


class SuspectChoice(Enum):
    """keep: a replica that fails, fails the sync for all. drop: the next attempt goes on without it."""

    keep = "keep"
    drop = "drop"


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
    """witness: before the first sync, compare the declared layout with what the engine's own loader does. trainer_witness:
    compare the trainer's layout, bit by bit, with what the trainer itself would export as a Hugging Face checkpoint. Every
    tensor is gathered once for it, so it is off by default.
    """

    level: VerifyLevel = VerifyLevel.digest
    witness: bool = True
    trainer_witness: bool = False


@dataclass(kw_only=True)
class RecordedConf:
    """What a recorded engine layout may leave out, as patterns of names (* matches anything).

    unserved: HF tensors that the engine's loader does not take (a draft layer). untouched: engine parameters that no HF tensor
    fills and that keep their values.
    """

    unserved: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class TimeoutsConf:
    """Seconds; see weight_sync.session.session.Timeouts."""

    connect: float = 300.0
    sync: float = 300.0
    abort: float = 60.0


@dataclass(kw_only=True)
class FailureConf:
    """What happens after a failure; see weight_sync.session.failure. attempts: of one sync, each after a complete fence.

    seconds: no attempt begins later than this after the first. on_suspect: keep: a replica that fails, fails the sync for all;
    drop: the next attempt goes on without it, and it is not resumed and stays out until it joins again. other_source: avoid a
    trainer rank whose write failed, where another one holds the same bytes.
    """

    attempts: int = 1
    seconds: float = 600.0
    on_suspect: SuspectChoice = SuspectChoice.keep
    other_source: bool = False


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


class LandingChoice(Enum):
    """Where received bytes go: live tensors of the engine; its own loader; auto: the loader where tensors cannot be written."""

    auto = "auto"
    live = "live"
    loader = "loader"


@dataclass(kw_only=True)
class LandingConf:
    """Engines whose live tensors are no longer the checkpoint's (docs/quant.md, "By the engine's own loader").

    to: live: write into live tensors, refuse such engines. loader: whole HF tensors are received beside the weights, and the
    engine's own loader places them. auto: live, but where an engine has tensors that cannot be written: loader, for all
    engines, with a warning that names them. budget: bytes of HF tensors that each engine worker holds at a time for its loader.
    """

    to: LandingChoice = LandingChoice.auto
    budget: int = 1 << 30


@dataclass(kw_only=True)
class ObserveConf:
    """keys: metric names beside weight_sync/*. limit: bytes/s of the wire, for the share-of-limit column; null: unknown."""

    wandb: WandbMode = WandbMode.offline
    project: str = "weight_sync"
    keys: MetricKeys = MetricKeys.plain
    limit: float | None = None


class SnapshotChoice(Enum):
    """Where trainer ranks keep what they last sent: in host memory, or on the device that their parameters are on."""

    host = "host"
    device = "device"


@dataclass(kw_only=True)
class DeltaConf:
    """Syncs that send only elements that changed since the last committed version (docs/delta.md).

    snapshot: where each trainer rank keeps a copy of what it last sent (as many bytes as it sends); with weights on a GPU,
    device is a hundred times faster. max_share: a rank whose encoded changes take more than this share of its bytes makes that
    sync a complete one. staging: bytes for encoded changes on each trainer rank, and on each engine worker the larger of this
    and what budget.target needs; on GPUs, half of what changes or more.
    """

    enabled: bool = False
    snapshot: SnapshotChoice = SnapshotChoice.host
    max_share: float = 0.5
    staging: int = 64 << 20


class StraddleChoice(Enum):
    """Groups of a quantised weight that lie on several trainer ranks. exchange: their magnitudes, before each sync."""

    exchange = "exchange"
    refuse = "refuse"


@dataclass(kw_only=True)
class QuantConf:
    """What the engines hold quantised. scheme: auto: as the engines' checkpoint says (quantization_config of its config.json);
    none or bf16: nothing; or a file of conf/weight_sync/quant by name.

    options: keys of that file to replace ({group: [64, 64]}). exclude: modules that stay as they are, by HF path, end of a path
    or "re:" pattern, beside those that no engine quantises; with a named scheme only (auto has the checkpoint's own list).
    check_finite: NaN and infinities in weights to be quantised are an error, before anything is paused. report: say with each
    sync what quantising cost (largest error, saturated values, zero blocks); twice the kernels' time.
    """

    scheme: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    exclude: list[str] = field(default_factory=list)
    straddle: StraddleChoice = StraddleChoice.exchange
    check_finite: bool = True
    report: bool = True


@dataclass(kw_only=True)
class SyncConf:
    """The group `weight_sync`: one strategy. strategy: its name, equal to the file's. preflight: what must be there.

    family: a name, the path of a YAML file, auto (by the HF config's architecture), or recorded: none is needed, HF tensors are
    those that trainer ranks publish (trainer=fsdp2) and the engine's layout is recorded. engine: where its layout comes from.
    declare: {pattern of names: derived, constant or state} for engine tensors that no plan writes and no table of ours knows.
    """

    strategy: str = MISSING
    family: str = "auto"
    engine: EngineLayout = EngineLayout.auto
    recorded: RecordedConf = field(default_factory=RecordedConf)
    quant: QuantConf = field(default_factory=QuantConf)
    transport: TransportConf = field(default_factory=TransportConf)
    verify: VerifyConf = field(default_factory=VerifyConf)
    pause: PauseChoice = PauseChoice.auto
    draft: DraftChoice = DraftChoice.refuse
    declare: dict[str, str] = field(default_factory=dict)
    timeouts: TimeoutsConf = field(default_factory=TimeoutsConf)
    failure: FailureConf = field(default_factory=FailureConf)
    costs: CostsConf = field(default_factory=CostsConf)
    budget: BudgetConf = field(default_factory=BudgetConf)
    landing: LandingConf = field(default_factory=LandingConf)
    delta: DeltaConf = field(default_factory=DeltaConf)
    observe: ObserveConf = field(default_factory=ObserveConf)


@dataclass(kw_only=True)
class PlacementConf:
    """Where Ray puts a role's processes: what each process takes. resources: Ray custom resources, {"trainer_node": 0.01}."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainerConf:
    """The trainer side. kind: megatron, fsdp2, or miles (its train script is started, see `miles`). python: interpreter of its
    environment. dp follows from ranks.

    vocab_multiple: Megatron pads the vocabulary to a multiple of this times tp (make_vocab_size_divisible_by).
    pipeline: layers of each virtual stage. optimizer: distributed or replicated (megatron). dtype: of the parameters; null: the
    checkpoint's. casts: dtypes that parameters may have where the served model has another, [float32] for float32 masters of
    a bfloat16 model: a sync then casts their values. Without it a difference of dtypes is an error.
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
    casts: list[str] = field(default_factory=list)
    placement: PlacementConf = field(default_factory=PlacementConf)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class RolloutConf:
    """The rollout side: `engines` servers of tp * pp workers. kind: sglang or vllm.

    checkpoint: folder that the engines load where it is not the trainer's (a quantised one); null: model.path.
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
    checkpoint: str | None = None
    host: str = "127.0.0.1"
    start_seconds: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    placement: PlacementConf = field(default_factory=PlacementConf)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelConf:
    """path: a HF checkpoint folder; null: make a tiny random one of `kind` and `dtype` with `sizes` on the spot.

    config: what planning reads instead of the folder's config.json: the name of a shipped config, or a path. A job that names
    one makes no tiny model: it needs a path to run.
    """

    path: str | None = None
    config: str | None = None
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
class PlanConf:
    """What only planning uses. gpus_per_node: trainer ranks fill nodes in rank order, engines follow; null: hosts unknown.

    step_seconds: of one step without the sync, for the sync's share of a step. microbatches, microbatch_seconds: k and T_mb of
    the trainer, for the bubble of asynchronous training, T_sync / (k * T_mb + T_sync).
    """

    gpus_per_node: int | None = None
    step_seconds: float | None = None
    microbatches: int | None = None
    microbatch_seconds: float | None = None


@dataclass(kw_only=True)
class MilesConf:
    """With trainer=miles: what of miles's command line the job does not say already (integrations/miles/README.md).

    script: train.py or train_async.py of a miles checkout; null: the command is printed, nothing is started. model: the name of
    miles's model definition, which gives the model's own flags. arguments: {flag without its dashes: value}; true: the flag
    alone, null: left out, a list: several words. environment: variables of the job. ray_job: address of a Ray cluster's
    dashboard that the job is submitted to; null: the script is started here. dry_run: print and check, start nothing.
    """

    script: str | None = None
    model: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    ray_job: str | None = None
    dry_run: bool = False


@dataclass(kw_only=True)
class JobConf:
    """The stand-alone job of train.py: rounds of {optimizer steps, sync, generate, check}.

    cluster: the hardware that plan and simulate predict for (a file of conf/weight_sync/cluster, or a path); a run ignores it.
    """

    weight_sync: Any = None
    trainer: TrainerConf = field(default_factory=TrainerConf)
    rollout: RolloutConf = field(default_factory=RolloutConf)
    model: ModelConf = field(default_factory=ModelConf)
    ray: RayConf = field(default_factory=RayConf)
    plan: PlanConf = field(default_factory=PlanConf)
    miles: MilesConf = field(default_factory=MilesConf)
    cluster: str | None = None
    rounds: int = 3
    steps_per_round: int = 1
    prompts: list[list[int]] = field(default_factory=lambda: [[3, 14, 15, 92, 65], [27, 18, 28, 182]])
    max_new_tokens: int = 16
    check_tokens: bool = True
    output_dir: str = "outputs"
