"""Cluster: the hardware a sync is simulated on, read from conf/weight_sync/cluster/NAME.yaml or from a file of your own.

Rates are bytes per second in one direction, times are seconds. `bench link` measures these numbers on the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weight_sync.errors import ConfigError
from weight_sync.yamls import read_yaml

Rate = Annotated[float, Field(gt=0, description="bytes/s")]
Seconds = Annotated[float, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Local(_Strict):
    """What ranks of one domain reach each other by (NVLink, or loopback on a CPU machine).

    rate: of one rank, each way. domain: ranks (GPUs) that share it; larger than gpus_per_node for a rack-wide NVLink.
    serial: the link idles while a write is issued (blocking copies); otherwise writes queue up and it does not.
    ipc: what the kernel of transport cuda_ipc reaches over it, which takes short and strided ranges and to which a write costs
    nothing; its long ranges go by copy engines at `rate`. null: as `rate`.
    """

    rate: Rate
    domain: int = Field(ge=1)
    serial: bool = False
    ipc: Rate | None = None


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
    """What does not depend on bytes: pausing, calls for each staging round, the call that verifies, commit and resume; compare:
    a transfer's two digests brought to the controller and compared there."""

    pause: Seconds = 0.0
    round: Seconds = 0.0
    verify: Seconds = 0.0
    finish: Seconds = 0.0
    compare: Seconds = 0.0


class Python(_Strict):
    """What the agents' Python costs beside the bytes. check: a parameter of a trainer rank, seen not to have moved: before
    the pause, and in each round while bytes are on the wire. send, receive: a transfer on its trainer rank and on its engine
    worker, mostly its digest. compare (see Control) is the controller's share.
    """

    check: Seconds = 0.0
    send: Seconds = 0.0
    receive: Seconds = 0.0


class Quantise(_Strict):
    """look: weights seen before the pause (magnitudes, NaN), bytes of weights a second. make: kernels that fill the staging
    buffer with values and scales, bytes read and written a second, the report of the error included."""

    look: Rate
    make: Rate


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

    pcie: one GPU to its network card or to host memory. nic: null on a single machine. transports: those that the numbers are
    of (transport_name() says which one a job uses); empty: not said. quantise: null where it is not known; then weights are
    seen at digest_source and made at copy_rate.
    """

    name: str
    description: str
    transports: tuple[str, ...] = ()
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
    python: Python = Python()
    quantise: Quantise | None = None
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


def transport_name(name: str, options: Mapping[str, Any]) -> str:
    """One word for a transport of the config: rdma, tcp, nvlink, ipc, cma, or its own name."""
    words = {"nvlink_intra": "nvlink", "cuda_ipc": "ipc"}
    word = str(options.get("protocol", name))
    return words.get(word, word)


def cluster_names() -> list[str]:
    """The shipped clusters."""
    root = resources.files("weight_sync_conf").joinpath("weight_sync", "cluster")
    return sorted(item.name[:-5] for item in root.iterdir() if item.name.endswith(".yaml"))


def load_cluster(name: str, changes: Mapping[str, Any] | None = None) -> Cluster:
    """A shipped cluster by name, or the YAML file at a path. Raises ConfigError naming each key that is wrong.

    changes: values by path ("fabric.oversubscription") that replace those of the file.
    """
    path, file = Path(name), name
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"cluster={name}: no such file; shipped are {', '.join(cluster_names())}")
        text = path.read_text()
    elif name in cluster_names():
        text = resources.files("weight_sync_conf").joinpath("weight_sync", "cluster", f"{name}.yaml").read_text()
        file = f"conf/weight_sync/cluster/{name}.yaml"
    else:
        raise ConfigError(f"cluster={name}: there are {', '.join(cluster_names())}, or give the path of a YAML file")
    data = read_yaml(text, file, ConfigError)
    if isinstance(data, dict):
        for key, value in (changes or {}).items():
            _replace(data, key, value)
    return parse_cluster(data, f"cluster {name}")


def _replace(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its path; blocks that the file leaves out are made, and checked with the rest."""
    *blocks, last = key.split(".")
    for block in blocks:
        inner = data.get(block)
        if inner is None:
            inner = data[block] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"cluster.{key}: {block} is a value, not a block of keys")
        data = inner
    data[last] = value


def parse_cluster(data: Any, where: str) -> Cluster:
    """A cluster from plain data. Raises ConfigError naming each key that is wrong."""
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'the whole'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{where}: {'; '.join(problems)}") from None
