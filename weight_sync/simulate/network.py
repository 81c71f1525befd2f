"""Network: the resources of a cluster on which both sides are placed, and which of them a flow between two ranks needs.

A place is a rank of either side: trainer ranks first, then rollout ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import ConfigError, listed
from weight_sync.ids import Side
from weight_sync.simulate.cluster import Cluster
from weight_sync.simulate.fluid import Floats, Ints


@dataclass(frozen=True, slots=True)
class Slow:
    """A straggler: a rank whose links and local work run at `share` of their rate."""

    side: Side
    rank: int
    share: float


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the cluster. down: network cards, as (node, card); their ranks use the next card of the node.

    dead_engine: (index of the engine, seconds after the start of writing at which it stops answering).
    """

    slow: tuple[Slow, ...] = ()
    down: tuple[tuple[int, int], ...] = ()
    dead_engine: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Node and place within it of every rank, trainer ranks first."""

    trainers: int
    node: Ints
    gpu: Ints

    @property
    def rollouts(self) -> int:
        return len(self.node) - self.trainers


def place(cluster: Cluster, trainers: int, rollouts: int, hosts: Sequence[str] = (), *, share_nodes: bool = False) -> Placement:
    """Where ranks stand. hosts: of all ranks, when known; otherwise ranks fill nodes in order.

    share_nodes: rollout ranks go on in the trainer's last node instead of starting a new one; always so without a nic.
    Raises ConfigError when more ranks are on a host than it has GPUs.
    """
    world, per = trainers + rollouts, cluster.gpus_per_node
    if hosts and all(hosts):
        if len(hosts) != world:
            raise ConfigError(f"{len(hosts)} hosts given for {trainers} + {rollouts} ranks")
        names = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        node = np.asarray([names[host] for host in hosts], np.int64)
        seen = [0] * len(names)
        gpu = np.zeros(world, np.int64)
        for i, n in enumerate(node.tolist()):
            gpu[i], seen[n] = seen[n], seen[n] + 1
        over = [f"{host} has {seen[i]}" for host, i in names.items() if seen[i] > per]
        if over:
            raise ConfigError(f"cluster {cluster.name} has {per} GPUs a node, but {listed(over)} ranks")
        return Placement(trainers, node, gpu)
    slot = np.arange(world)
    if not share_nodes and cluster.nic is not None:
        slot[trainers:] += -trainers % per
    if cluster.nic is None and slot[-1] >= per:
        raise ConfigError(f"cluster {cluster.name} is one machine of {per} ranks, but there are {trainers} + {rollouts}")
    return Placement(trainers, slot // per, slot % per)


@dataclass
class Network:
    """names, kinds, capacity: of every resource. Units: bytes/s for links, seconds of work a second for the rest.

    kinds: local (NVLink or loopback), nic, pcie, leaf are links; issue, work, cores are what ranks do. transport: as
    transport_name() has it; "" takes the local link where there is one and the network elsewhere.
    """

    cluster: Cluster
    placement: Placement
    faults: Faults
    transport: str = ""
    names: list[str] = field(default_factory=list[str])
    kinds: list[str] = field(default_factory=list[str])
    capacity: Floats = field(default_factory=lambda: np.zeros(0))
    domain: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    leaf: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    leaf_rate: float = 0.0

    def __post_init__(self) -> None:
        c, p = self.cluster, self.placement
        capacity: list[float] = []

        def add(kind: str, names: list[str], rates: list[float]) -> Ints:
            first = len(self.names)
            self.names += names
            self.kinds += [kind] * len(names)
            capacity.extend(rates)
            return np.arange(first, len(self.names), dtype=np.int64)

        places = range(len(p.node))
        who = [self.label(i) for i in places]
        share = self._shares(who)
        self._out = add("local", [f"{w} local out" for w in who], [self.local_rate * s for s in share])
        self._in = add("local", [f"{w} local in" for w in who], [self.local_rate * s for s in share])
        self._issue = add("issue", [f"{w} issuing writes" for w in who], [c.writes.threads * s for s in share])
        self._work = add("work", [f"{w} hashing and copying" for w in who], list(share))
        if c.pcie is not None:
            self._pcie = (
                add("pcie", [f"{w} pcie out" for w in who], [c.pcie * s for s in share]),
                add("pcie", [f"{w} pcie in" for w in who], [c.pcie * s for s in share]),
            )
        nodes = int(p.node.max()) + 1
        if c.nic is not None:
            cards = [(n, k) for n in range(nodes) for k in range(c.nic.per_node)]
            self._nic = (
                add("nic", [f"node {n} nic {k} out" for n, k in cards], [c.nic.rate] * len(cards)),
                add("nic", [f"node {n} nic {k} in" for n, k in cards], [c.nic.rate] * len(cards)),
            )
            self._card = self._cards(c.nic.per_node, nodes)
            self.leaf = p.node // c.fabric.nodes_per_leaf
            self.leaf_rate = c.nic.rate * c.nic.per_node * min(c.fabric.nodes_per_leaf, nodes) / c.fabric.oversubscription
            leaves = int(self.leaf.max()) + 1
            self._up = (
                add("leaf", [f"leaf {i} up" for i in range(leaves)], [self.leaf_rate] * leaves),
                add("leaf", [f"leaf {i} down" for i in range(leaves)], [self.leaf_rate] * leaves),
            )
        if c.cores is not None:
            self._cores = add("cores", [f"node {n} cores" for n in range(nodes)], [c.cores.count] * nodes)
        self.capacity = np.asarray(capacity)
        self.domain = (p.node * c.gpus_per_node + p.gpu) // c.local.domain

    @property
    def local_rate(self) -> float:
        """Bytes/s of a rank over its local link, at best."""
        return self.cluster.local.rate

    @property
    def write_seconds(self) -> float:
        """What a write costs beyond its bytes; nothing where thousands are asked for at once."""
        return 0.0 if self.transport == "ipc" else self.cluster.writes.seconds

    def near(self, source: Ints, target: Ints) -> NDArray[np.bool_]:
        """Which pairs of places use the local link. Raises ConfigError where the transport cannot reach the others.

        Mooncake and NIXL with rdma go over the network card even within a node; cuda_ipc and nvlink_intra never leave one.
        """
        if self.transport == "rdma" and self.cluster.nic is not None:
            return np.zeros(len(source), np.bool_)
        node = self.placement.node
        inside = node[source] == node[target]
        if self.transport not in ("ipc", "nvlink"):
            return self.domain[source] == self.domain[target]
        if (apart := np.flatnonzero(~inside)).size:
            a, b = int(source[apart[0]]), int(target[apart[0]])
            raise ConfigError(
                f"transport {self.transport} stays within one node, but {self.label(a)} sends to {self.label(b)} on another "
                f"(nodes {node[a]} and {node[b]} of cluster {self.cluster.name}): take rdma or tcp, or put both on one node"
            )
        return inside

    def _shares(self, who: list[str]) -> list[float]:
        share = [1.0] * len(who)
        for slow in self.faults.slow:
            size = self.placement.trainers if slow.side is Side.TRAINER else self.placement.rollouts
            if not 0 <= slow.rank < size:
                raise ConfigError(f"straggler {slow.side} {slow.rank}: there are {size} {slow.side} ranks")
            if not 0 < slow.share <= 1:
                raise ConfigError(f"straggler {slow.side} {slow.rank}: share {slow.share:g} must be above 0 and at most 1")
            share[slow.rank + (self.placement.trainers if slow.side is Side.ROLLOUT else 0)] = slow.share
        return share

    def _cards(self, per_node: int, nodes: int) -> Ints:
        """The card of every place, cards that are down replaced by the next one of the node."""
        p = self.placement
        down = set(self.faults.down)
        bad = [f"node {n} card {k}" for n, k in down if not (0 <= n < nodes and 0 <= k < per_node)]
        if bad:
            raise ConfigError(f"failed link: there is no {listed(bad)}; nodes 0 to {nodes - 1}, cards 0 to {per_node - 1}")
        card = p.gpu * per_node // self.cluster.gpus_per_node
        for i, (n, k) in enumerate(zip(p.node.tolist(), card.tolist(), strict=True)):
            good = [(k + j) % per_node for j in range(per_node) if (n, (k + j) % per_node) not in down]
            if not good:
                raise ConfigError(f"failed link: node {n} has no network card left; no sync is possible")
            card[i] = good[0]
        return p.node * per_node + card

    def paths(self, source: Ints, target: Ints, writes_per_byte: Floats, long: Floats | None = None) -> tuple[Ints, Floats]:
        """(resource, coef) [flows, 9] of flows between places: links, issuing writes, and the cores of both ends.

        long: share of each flow that is in long ranges; None: nothing.
        """
        c, n = self.cluster, len(source)
        near = self.near(source, target)
        far = ~near
        if c.nic is None and far.any():
            raise ConfigError(f"cluster {c.name} has no network, but ranks on different nodes exchange bytes")
        resource, coef = np.zeros((n, 9), np.int64), np.zeros((n, 9))
        resource[:, 0], resource[:, 1] = self._out[source], self._in[target]
        coef[near, :2] = 1.0
        if self.transport == "ipc" and c.local.ipc is not None:
            short = 1.0 - (np.zeros(n) if long is None else long[near])
            coef[near, :2] += (short * (c.local.rate / c.local.ipc - 1.0))[:, None]
        if c.local.serial:
            coef[near, 0] += writes_per_byte[near] * self.write_seconds / c.writes.threads * self.local_rate
        if c.nic is not None:
            resource[:, 2], resource[:, 3] = self._nic[0][self._card[source]], self._nic[1][self._card[target]]
            coef[far, 2:4] = 1.0
            apart = far & (self.leaf[source] != self.leaf[target])
            resource[:, 4], resource[:, 5] = self._up[0][self.leaf[source]], self._up[1][self.leaf[target]]
            coef[apart, 4:6] = 1.0
        if c.pcie is not None:
            resource[:, 6], resource[:, 7] = self._pcie[0][source], self._pcie[1][target]
            coef[far, 6:8] = 1.0
        issue = self._issue[source]
        resource[:, 8] = issue
        coef[:, 8] = writes_per_byte * self.write_seconds
        if c.cores is not None:
            resource = np.column_stack([resource, self._cores[self.placement.node[source]]])
            coef = np.column_stack([coef, np.full(n, c.cores.wire)])
        return resource, coef

    def work(self, places: Ints, seconds_per_byte: Floats, width: int) -> tuple[Ints, Floats]:
        """(resource, coef) [places, width] of hashing or copying on each place."""
        resource, coef = np.zeros((len(places), width), np.int64), np.zeros((len(places), width))
        resource[:, 0], coef[:, 0] = self._work[places], seconds_per_byte
        if self.cluster.cores is not None:
            resource[:, 1], coef[:, 1] = self._cores[self.placement.node[places]], seconds_per_byte
        return resource, coef

    def label(self, place: int) -> str:
        """trainer 3, rollout 7."""
        trainers = self.placement.trainers
        return f"trainer {place}" if place < trainers else f"rollout {place - trainers}"

    @property
    def width(self) -> int:
        return 9 if self.cluster.cores is None else 10
