"""Simulate one sync of ours: look at what is quantised, pause, write in rounds (hashing meanwhile), verify, commit, resume.

Phases follow one another as in the session: a round ends for everybody before the next one begins, hashes of the live
destination are taken when all bytes have landed. What Python costs for each parameter and transfer (Cluster.python) goes
with what it accompanies: the look that nothing has moved before the pause, and again while bytes are on the wire - or after
them, where they went through the staging buffer and the rank waits for each half of it (all transports but cuda_ipc, whose
order the device keeps).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weight_sync.errors import ConfigError
from weight_sync.plan.schedule import Schedule
from weight_sync.simulate.cluster import Cluster
from weight_sync.simulate.fluid import Floats, Flows, Ints, Solution, Step, loads, solve, summed
from weight_sync.simulate.network import Faults, Network, place
from weight_sync.simulate.work import LONG, Round, Work, work_of


@dataclass(frozen=True, slots=True)
class Options:
    """How the sync is run. bucket: bytes handed over at a time, and the longest write. verify: hash both sides.

    relay: the trainer sends to the first engine only, each engine passes every bucket on to the next (engines: how many); a
    question to the simulator, sessions do not do it. bytes_ratio: see work_of. transport: see Network. steps: about how many
    slots a sync is cut into; more is finer and slower.
    """

    bucket: float = float(32 << 20)
    verify: bool = True
    relay: bool = False
    engines: int = 1
    bytes_ratio: float = 1.0
    share_nodes: bool = False
    transport: str = ""
    steps: int = 200


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the timeline. rank: "controller", "trainer 3", "rollout 7"."""

    rank: str
    phase: str
    start: float
    seconds: float
    nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """A resource: its name, its kind, busy seconds (full seconds of work) and its share of the time of writing."""

    name: str
    kind: str
    busy: float
    share: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """seconds: of the whole sync. bound_seconds: no plan and no transport could write these bytes faster over these links.

    limit: in words, what the time goes to. bound_limit: the narrowest cut. phases: seconds of each.
    """

    seconds: float
    bound_seconds: float
    limit: str
    bound_limit: str
    phases: dict[str, float]
    nbytes: float
    writes: float
    critical: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """prediction; spans: the timeline; usage: every resource in use, busiest first; steps: (names, when, shares) of links.

    failed: why the sync did not commit, with the seconds until that is known in prediction.seconds; None when it did.
    """

    prediction: Prediction
    spans: tuple[Span, ...]
    usage: tuple[Usage, ...]
    network: Network
    writing: tuple[Step, ...] = field(repr=False)
    failed: str | None = None


def predict(schedule: Schedule, cluster: Cluster, options: Options | None = None, faults: Faults | None = None) -> Prediction:
    """Seconds of a sync of this schedule on this cluster; quick, for planning. Hosts are the plan's when it knows them all."""
    fast = options or Options(steps=40)
    return simulate(schedule, cluster, fast, faults).prediction


def simulate(schedule: Schedule, cluster: Cluster, options: Options | None = None, faults: Faults | None = None) -> Simulation:
    """The same with the timeline and the use of every link. Raises ConfigError for options and faults that make no sense."""
    options = options or Options()
    if not options.bucket > 0 or not options.bytes_ratio > 0:
        raise ConfigError(f"bucket={options.bucket:g} and bytes_ratio={options.bytes_ratio:g} must be above 0")
    plan = schedule.plan
    work = work_of(schedule, options.bucket, options.bytes_ratio)
    hosts = [*plan.source_hosts, *plan.target_hosts]
    placement = place(cluster, work.trainers, work.rollouts, hosts, share_nodes=options.share_nodes)
    return run(work, Network(cluster, placement, faults or Faults(), options.transport), options)


def run(work: Work, network: Network, options: Options) -> Simulation:
    """Simulate work that is already added up."""
    c, faults = network.cluster, network.faults
    if work.rollouts % options.engines:
        raise ConfigError(f"{work.rollouts} rollout ranks do not divide into {options.engines} engines")
    if options.relay and options.engines < 2:
        raise ConfigError("relay: needs at least two engines, and options.engines to say how many there are")
    bound, bound_limit = _bound(work, network, options)
    slot = max(bound, 1e-9) / options.steps
    spans, before = _before(work, network, slot)
    phases = {"quantise": 0.0, "pause": 0.0, "write": 0.0, "place": 0.0, "verify": 0.0, "finish": c.control.finish} | before
    begun = now = sum(before.values())
    writing: list[Step] = []
    heaviest: Floats = np.zeros(len(network.capacity))
    for round_ in work.rounds:
        flows, solution, ends = _write(work, round_, network, options, slot)
        after, waiting = _local(network, _aside(work, round_, network)[1], 0, 1.0, slot)
        extra = c.control.round + waiting + (_fill(network, options) if options.relay else 0.0)
        spans += _write_spans(work, ends, flows, solution, now)
        spans += _local_spans("trainer", "check", after, round_.staged, now + solution.seconds)
        writing += [Step(now + s.start, s.seconds, s.usage) for s in solution.steps]
        heaviest = heaviest + loads(flows, network.capacity)
        seconds = solution.seconds + extra
        phases["write"] += seconds
        now += seconds
        copying, seconds = _local(network, round_.placed, work.trainers, 1 / c.copy_rate, slot)
        spans += _local_spans("rollout", "place", copying, round_.placed, now)
        phases["place"] += seconds
        now += seconds
    failed: str | None = None
    if faults.dead_engine is not None:
        failed, now, phases, spans = _died(faults.dead_engine, begun, network, options, phases, spans)
    else:
        if options.verify:
            each = work.received / c.digest_target
            if work.items is not None:
                each = each + work.items.receives * c.python.receive
            hashing, seconds = _local(network, each, work.trainers, 1.0, slot)
            spans += _local_spans("rollout", "verify", hashing, work.received, now)
            compare = c.control.compare * work.transfers
            spans.append(Span("controller", "verify", now + seconds, compare + c.control.verify))
            seconds += compare + c.control.verify
            phases["verify"] = seconds
            now += seconds
        spans.append(Span("controller", "finish", now, c.control.finish))
        now += c.control.finish
    top = int(np.argmax(heaviest)) if heaviest.any() else 0
    usage = _usage(network, heaviest, phases["write"])
    limit = _limit(network, phases, heaviest, top, now, bound)
    prediction = Prediction(
        now, bound, limit, bound_limit, phases, work.nbytes, work.writes, network.names[top] if heaviest.any() else "none"
    )
    return Simulation(prediction, tuple(spans), usage, network, tuple(writing), failed)


def _before(work: Work, network: Network, slot: float) -> tuple[list[Span], dict[str, float]]:
    """What comes before the first write, and its seconds: no parameter has moved, weights that are quantised are looked at
    (nothing is paused yet), engines are paused."""
    c, items = network.cluster, work.items
    if items is None:
        return [Span("controller", "pause", 0.0, c.control.pause)], {"pause": c.control.pause}
    quantised = bool(items.looked.any())
    each = items.params * c.python.check + items.looked / (c.quantise.look if c.quantise else c.digest_source)
    looking, seconds = _local(network, each, 0, 1.0, slot)
    spans = _local_spans("trainer", "quantise" if quantised else "check", looking, items.looked, 0.0)
    pause = Span("controller", "pause", seconds, c.control.pause)
    first = "quantise" if quantised else "pause"  # where a session's own record has it
    return [*spans, pause], {"pause": c.control.pause} | {first: seconds + (0.0 if quantised else c.control.pause)}


def _aside(work: Work, round_: Round, network: Network) -> tuple[Floats, Floats]:
    """Seconds of Python of each trainer rank in a round: (beside the wire, after it). See the module docstring."""
    items, python, none = work.items, network.cluster.python, np.zeros(work.trainers)
    if items is None:
        return none, none
    share = summed(round_.source, round_.nbytes, work.trainers) / np.maximum(work.sent, 1)
    each = (items.params * python.check + items.sends * share * python.send) * (share > 0)
    late = none if round_.staged is None or network.transport == "ipc" else round_.staged
    return each * (1 - late), each * late


def _write(
    work: Work, round_: Round, network: Network, options: Options, slot: float
) -> tuple[Flows, Solution, tuple[Ints, Ints, Floats]]:
    """Flows of a round, their solution, and (source, target, bytes) of those that are bytes, as places."""
    c, trainers = network.cluster, work.trainers
    source, target, nbytes, writes = round_.source, round_.target + trainers, round_.nbytes, round_.writes
    long = None if round_.long is None else round_.long / np.maximum(nbytes, 1)
    if options.relay:
        source, target, nbytes, writes = _relayed(work, round_, options)
        long = np.full(len(nbytes), float(options.bucket >= LONG))
    per_byte = writes / np.maximum(nbytes, 1)
    resource, coef = network.paths(source, target, per_byte, long)
    # What the source does meanwhile: hash what it sends, copy what is packed, make what is quantised, and its Python.
    hashed = summed(round_.source, round_.nbytes, trainers) / c.digest_source if options.verify else 0.0
    made = 0.0 if round_.made is None else round_.made / (c.quantise.make if c.quantise else c.copy_rate)
    busy = hashed + round_.packed / c.copy_rate + made + _aside(work, round_, network)[0]
    who = np.flatnonzero(busy > 0)
    # One unit of such a flow is one second of work.
    extra, weight = network.work(who, np.ones(len(who)), network.width)
    flows = Flows(np.concatenate([nbytes, busy[who]]), np.concatenate([resource, extra]), np.concatenate([coef, weight]))
    return flows, _solve_mixed(flows, network, len(nbytes), slot), (source, target, nbytes)


def _solve_mixed(flows: Flows, network: Network, transfers: int, slot: float) -> Solution:
    """Solve flows of bytes beside flows of seconds: the latter are scaled so that all rise together sensibly."""
    if transfers == len(flows):
        return solve(flows, network.capacity, slot)
    scale = max(float(flows.amount[:transfers].max(initial=0.0)), 1.0) / float(flows.amount[transfers:].max(initial=0.0))
    amount, coef = flows.amount.copy(), flows.coef.copy()
    amount[transfers:] *= scale
    coef[transfers:] /= scale
    return solve(Flows(amount, flows.resource, coef), network.capacity, slot)


def _relayed(work: Work, round_: Round, options: Options) -> tuple[Ints, Ints, Floats, Floats]:
    """Flows when engine 0 gets everything from the trainer and passes it on: places, bytes, writes.

    The next engine's rank gets what it needs from its twin. Both run at the same time, bucket by bucket.
    """
    width, trainers = work.rollouts // options.engines, work.trainers
    first = round_.target < width
    got = summed(round_.target[first], round_.nbytes[first], width)
    ranks = np.arange(width)
    source = [round_.source[first], *(trainers + e * width + ranks for e in range(options.engines - 1))]
    target = [round_.target[first] + trainers, *(trainers + (e + 1) * width + ranks for e in range(options.engines - 1))]
    passed = np.tile(got, options.engines - 1)
    nbytes = np.concatenate([round_.nbytes[first], passed])
    writes = np.concatenate([round_.writes[first], np.ceil(passed / options.bucket)])
    keep = nbytes > 0
    return np.concatenate(source)[keep], np.concatenate(target)[keep], nbytes[keep], writes[keep]


def _fill(network: Network, options: Options) -> float:
    """Seconds until the last engine of a relay has its first bucket."""
    c = network.cluster
    rate = network.local_rate
    if c.nic is not None and network.transport not in ("ipc", "nvlink"):
        rate = c.nic.rate * c.nic.per_node / c.gpus_per_node
    return (options.engines - 1) * options.bucket / rate


def _local(network: Network, nbytes: Floats, first: int, per_byte: float, slot: float) -> tuple[Solution, float]:
    """Work of ranks on their own: of places from `first`, per_byte seconds for each of `nbytes`."""
    who = np.flatnonzero(nbytes > 0)
    if not len(who):
        return Solution(np.zeros(len(nbytes)), ()), 0.0
    resource, coef = network.work(who + first, np.full(len(who), per_byte), network.width)
    solution = solve(Flows(nbytes[who], resource, coef), network.capacity, slot)
    finish = np.zeros(len(nbytes))
    finish[who] = solution.finish
    return Solution(finish, solution.steps), solution.seconds


def _bound(work: Work, network: Network, options: Options) -> tuple[float, str]:
    """Bytes over the narrowest cut: each rollout rank's own way in, all ways out of the trainer's nodes, or out of its leaf
    switches where no engine is below one of them.

    With relay the trainer's side need send one engine's share only. Which trainer rank sends what is the planner's choice, so
    only their sum counts.
    """
    c, p = network.cluster, network.placement
    sources = np.unique(np.concatenate([r.source for r in work.rounds]))
    nodes = np.unique(p.node[: work.trainers])
    near_in = network.local_rate
    nic_in = c.nic.rate * max(1.0, c.nic.per_node / c.gpus_per_node) if c.nic is not None else near_in
    # A rank reached over both ways at once could take bytes at the sum of both.
    both = np.isin(network.domain[work.trainers :], network.domain[: work.trainers])
    if network.transport == "rdma" and c.nic is not None:
        both[:] = False
    elif network.transport in ("ipc", "nvlink"):
        both, nic_in = np.ones_like(both), 0.0
    way_in = np.where(both, near_in + (nic_in if c.nic is not None else 0.0), nic_in)
    inward = work.received / way_in
    rank = int(np.argmax(inward))
    candidates = [(float(inward[rank]), f"into rollout rank {rank}")]
    if c.nic is not None and network.transport not in ("ipc", "nvlink"):
        if not both.any():
            share = 1 / options.engines if options.relay else 1.0
            out = c.nic.rate * c.nic.per_node * len(nodes)
            candidates.append((work.nbytes * share / out, "out of the trainer's nodes"))
            leaves = np.unique(network.leaf[: work.trainers])
            if not np.isin(network.leaf[work.trainers :], leaves).any():
                up = network.leaf_rate * len(leaves)
                candidates.append((work.nbytes * share / up, "out of the trainer's leaf switches"))
    else:
        candidates.append((work.nbytes / (near_in * len(sources)), "out of the trainer's ranks"))
    return max(candidates)


def _limit(network: Network, phases: dict[str, float], heaviest: Floats, top: int, seconds: float, bound: float) -> str:
    longest = max(phases, key=lambda name: phases[name])
    if longest != "write" or not heaviest.any():
        words = {
            "quantise": "looking at the weights before the pause",
            "pause": "pausing the engines", "place": "unpacking at the destination", "verify": "hashing at the destination",
            "finish": "commit and resume",
        }  # fmt: skip
        return words.get(longest, "nothing")
    kind = {"local": "link", "nic": "network card", "pcie": "PCIe", "leaf": "switch", "issue": "message rate"}
    return f"{kind.get(network.kinds[top], network.kinds[top])}: {network.names[top]}"


def _usage(network: Network, heaviest: Floats, seconds: float) -> tuple[Usage, ...]:
    order = np.argsort(-heaviest, kind="stable")
    return tuple(
        Usage(network.names[i], network.kinds[i], float(heaviest[i]), float(heaviest[i] / seconds) if seconds else 0.0)
        for i in order.tolist()
        if heaviest[i] > 0
    )


def _write_spans(work: Work, ends: tuple[Ints, Ints, Floats], flows: Flows, solution: Solution, now: float) -> list[Span]:
    """A bar for each rank until its last byte has left, or has arrived (of an engine that relays: the later of both)."""
    source, target, nbytes = ends
    finish = solution.finish[: len(source)]
    end = np.zeros(work.trainers + work.rollouts)
    moved = np.zeros(work.trainers + work.rollouts)
    for places in (source, target):
        np.maximum.at(end, places, finish)
        np.add.at(moved, places, nbytes)
    return [Span(_name(work.trainers, i), "write", now, float(end[i]), float(moved[i])) for i in np.flatnonzero(end).tolist()]


def _local_spans(side: str, phase: str, solution: Solution, nbytes: Floats | None, now: float) -> list[Span]:
    return [
        Span(f"{side} {i}", phase, now, float(solution.finish[i]), 0.0 if nbytes is None else float(nbytes[i]))
        for i in np.flatnonzero(solution.finish).tolist()
    ]


def _name(trainers: int, i: int) -> str:
    return f"trainer {i}" if i < trainers else f"rollout {i - trainers}"


def _died(
    dead: tuple[int, float], begun: float, network: Network, options: Options, phases: dict[str, float], spans: list[Span]
) -> tuple[str, float, dict[str, float], list[Span]]:
    """A sync whose engine stops answering while it is written: it fails when the transport says so, and nobody resumes.

    begun: when writing began.
    """
    engine, at = dead
    if not 0 <= engine < options.engines:
        raise ConfigError(f"dead engine {engine}: there are {options.engines}")
    if not at >= 0:
        raise ConfigError(f"dead engine at {at:g} s: must be 0 or later")
    c = network.cluster
    if at > phases["write"]:
        why = f"engine {engine} died {at:g} s after writing began, when all was written: it gives no digest"
    else:
        why = f"engine {engine} died {at:g} s after writing began: its writes fail"
    now = begun + at + c.detect.dead_peer
    # Writes to others go on until the failure is known; nothing after it.
    kept = [
        Span(s.rank, s.phase, s.start, min(s.seconds, now - s.start), s.nbytes)
        for s in spans
        if s.start < now and not (_engine_of(s.rank, network, options) == engine and s.start >= begun + at)
    ]
    text = f"{why}; known after {c.detect.dead_peer:g} s, no engine is resumed, the version stays"
    return text, now, {**phases, "write": now - begun, "verify": 0.0, "place": 0.0, "finish": 0.0}, kept


def _engine_of(rank: str, network: Network, options: Options) -> int:
    side, _, number = rank.partition(" ")
    return int(number) // (network.placement.rollouts // options.engines) if side == "rollout" else -1
