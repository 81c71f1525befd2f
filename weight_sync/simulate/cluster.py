"""Cluster: the hardware a sync is simulated on, read from conf/weight_sync/cluster/NAME.yaml or from a file of your own.

Rates are bytes per second in one direction, times are seconds. `bench link` measures these numbers on the machine it runs on.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weight_sync.errors import ConfigError

Rate = Annotated[float, Field(gt=0, description="bytes/s")]
Seconds = Annotated[float, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Local(_Strict):
    """What ranks of one domain reach each other by (NVLink, or loopback on a CPU machine).

    rate: of one rank, each way. domain: ranks (GPUs) that share it; larger than gpus_per_node for a rack-wide NVLink.
    serial: the link idles while a write is issued (blocking copies); otherwise writes queue up and it does not.
    """

    rate: Rate
    domain: int = Field(ge=1)
    serial: bool = False


class Nic(_Strict):
    """Network cards. per_node: cards in a node; GPU g of a node uses card g * per_node // gpus_per_node."""

    per_node: int = Field(ge=1)
    rate: Rate


class Fabric(_Strict):
    """Switches. nodes_per_leaf: nodes below one leaf; between leaves a leaf has 1 / oversubscription of their rate."""

    nodes_per_leaf: int = Field(default=1 << 30, ge=1)
    oversubscription: float = Field(default=1.0, ge=1.0)


class Writes(_Strict):
    """seconds: what issuing one write costs beyond its bytes. threads: writes of one rank that are issued side by side."""

    seconds: Seconds
    threads: int = Field(default=1, ge=1)


class Cores(_Strict):
    """CPU cores that moving, hashing and copying have to share (a machine without GPUs and RDMA).

    wire: core seconds for each byte moved, both ends and the kernel together.
    """

    count: float = Field(gt=0)
    wire: Seconds


class Control(_Strict):
    """What does not depend on bytes: pausing, each staging round, commit and resume; compare: one digest on the controller."""

    pause: Seconds = 0.0
    round: Seconds = 0.0
    finish: Seconds = 0.0
    compare: Seconds = 0.0


class Detect(_Strict):
    """Seconds until a dead peer is noticed by the transport."""

    dead_peer: Seconds


class Collective(_Strict):
    """What gathering strategies pay and shard-to-shard does not; see weight_sync/simulate/strategies.py.

    bus: bytes/s of a broadcast to everybody. host: bytes/s of loading into a replica in host memory. gather: share of the
    links' rate that a bucketed all-gather reaches. tensor: seconds a tensor, sending and loading it by itself. call: seconds a
    bucket and rollout rank, telling every engine. poll: seconds between two tries of the lock. fixed: seconds once a sync.
    """

    bus: Rate
    host: Rate
    gather: Annotated[float, Field(gt=0, le=1)]
    tensor: Seconds
    call: Seconds
    poll: Annotated[float, Field(gt=0)]
    fixed: Seconds


class Cluster(_Strict):
    """See the module docstring. copy: strided copy on one rank. digest_source, digest_target: one rank hashing its bytes.

    pcie: one GPU to its network card or to host memory. nic: null on a single machine.
    """

    name: str
    description: str
    gpus_per_node: int = Field(ge=1)
    gpu_memory: float = Field(gt=0, description="bytes of one GPU (or of one rank's share of host memory)")
    local: Local
    nic: Nic | None = None
    pcie: Rate | None = None
    fabric: Fabric = Fabric()
    writes: Writes
    copy_rate: Rate
    digest_source: Rate
    digest_target: Rate
    cores: Cores | None = None
    control: Control = Control()
    detect: Detect
    collective: Collective | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        if self.nic is not None and self.gpus_per_node % self.nic.per_node and self.nic.per_node % self.gpus_per_node:
            raise ValueError(
                f"nic.per_node={self.nic.per_node} and gpus_per_node={self.gpus_per_node}: one must be a multiple of the other"
            )
        if self.local.domain < self.gpus_per_node and self.nic is None:
            raise ValueError("ranks of one node outside local.domain need a nic")
        return self


def cluster_names() -> list[str]:
    """The shipped clusters."""
    root = resources.files("weight_sync_conf").joinpath("weight_sync", "cluster")
    return sorted(item.name[:-5] for item in root.iterdir() if item.name.endswith(".yaml"))


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, or the YAML file at a path. Raises ConfigError naming each key that is wrong."""
    import yaml

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"cluster={name}: no such file; shipped are {', '.join(cluster_names())}")
        text = path.read_text()
    elif name in cluster_names():
        text = resources.files("weight_sync_conf").joinpath("weight_sync", "cluster", f"{name}.yaml").read_text()
    else:
        raise ConfigError(f"cluster={name}: there are {', '.join(cluster_names())}, or give the path of a YAML file")
    try:
        return parse_cluster(yaml.safe_load(text), f"cluster {name}")
    except yaml.YAMLError as error:
        raise ConfigError(f"cluster {name}: not readable as YAML: {error}") from None


def parse_cluster(data: Any, where: str) -> Cluster:
    """A cluster from plain data. Raises ConfigError naming each key that is wrong."""
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'the whole'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None
