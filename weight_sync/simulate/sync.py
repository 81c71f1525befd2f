"""Simulate one sync of ours: pause, write in rounds (hashing meanwhile), verify, commit, resume.

Phases follow one another as in the session: a round ends for everybody before the next one begins, hashes of the live
destination are taken when all bytes have landed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weight_sync.errors import ConfigError
from weight_sync.plan.schedule import Schedule
from weight_sync.simulate.cluster import Cluster
from weight_sync.simulate.fluid import Floats, Flows, Ints, Solution, Step, loads, solve, summed
from weight_sync.simulate.network import Faults, Network, place
from weight_sync.simulate.work import Round, Work, work_of


@dataclass(frozen=True, slots=True)
class Options:
    """How the sync is run. bucket: bytes handed over at a time, and the longest write. verify: hash both sides.

    relay: the trainer sends to the first engine only, each engine passes every bucket on to the next (engines: how many).
    bytes_ratio: see work_of. steps: about how many slots a sync is cut into; more is finer and slower.
    """

    bucket: float = float(32 << 20)
    verify: bool = True
    relay: bool = False
    engines: int = 1
    bytes_ratio: float = 1.0
    share_nodes: bool = False
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
    return run(work, Network(cluster, placement, faults or Faults()), options)


def run(work: Work, network: Network, options: Options) -> Simulation:
    """Simulate work that is already added up."""
    c, faults = network.cluster, network.faults
    if work.rollouts % options.engines:
        raise ConfigError(f"{work.rollouts} rollout ranks do not divide into {options.engines} engines")
    if options.relay and options.engines < 2:
        raise ConfigError("relay: needs at least two engines, and options.engines to say how many there are")
    bound, bound_limit = _bound(work, network, options)
    spans: list[Span] = [Span("controller", "pause", 0.0, c.control.pause)]
    phases = {"pause": c.control.pause, "write": 0.0, "place": 0.0, "verify": 0.0, "finish": c.control.finish}
    now = c.control.pause
    writing: list[Step] = []
    heaviest: Floats = np.zeros(len(network.capacity))
    slot = max(bound, 1e-9) / options.steps
    for number, round_ in enumerate(work.rounds):
        flows, solution = _write(work, round_, network, options, slot, digest=options.verify and number == 0)
        extra = c.control.round + (_fill(network, options) if options.relay else 0.0)
        spans += _write_spans(work, round_, flows, solution, now)
        writing += [Step(now + s.start, s.seconds, s.usage) for s in solution.steps]
        heaviest = heaviest + loads(flows, network.capacity)
        seconds = solution.seconds + extra
        phases["write"] += seconds
        now += seconds
        copying, seconds = _local(network, round_.placed, work.trainers, 1 / c.copy_rate, slot)
        spans += _local_spans("place", copying, round_.placed, now)
        phases["place"] += seconds
        now += seconds
    failed: str | None = None
    if faults.dead_engine is not None:
        failed, now, phases, spans = _died(faults.dead_engine, network, options, phases, spans)
    else:
        if options.verify:
            hashing, seconds = _local(network, work.received, work.trainers, 1 / c.digest_target, slot)
            spans += _local_spans("verify", hashing, work.received, now)
            compare = c.control.compare * work.transfers
            spans.append(Span("controller", "verify", now + seconds, compare))
            seconds += compare
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


def _write(
    work: Work, round_: Round, network: Network, options: Options, slot: float, *, digest: bool
) -> tuple[Flows, Solution]:
    c, trainers = network.cluster, work.trainers
    source, target, nbytes, writes = round_.source, round_.target + trainers, round_.nbytes, round_.writes
    if options.relay:
        source, target, nbytes, writes = _relayed(work, round_, options)
    per_byte = writes / np.maximum(nbytes, 1)
    resource, coef = network.paths(source, target, per_byte)
    # What the source does meanwhile, in one thread: hash everything once, copy what is packed.
    busy = (work.sent / c.digest_source if digest else 0.0) + round_.packed / c.copy_rate
    busy = np.broadcast_to(busy, (trainers,))
    who = np.flatnonzero(busy > 0)
    # One unit of such a flow is one second of work.
    extra, weight = network.work(who, np.ones(len(who)), network.width)
    flows = Flows(np.concatenate([nbytes, busy[who]]), np.concatenate([resource, extra]), np.concatenate([coef, weight]))
    return flows, _solve_mixed(flows, network, len(nbytes), slot)


def _solve_mixed(flows: Flows, network: Network, transfers: int, slot: float) -> Solution:
    """Solve flows of bytes beside flows of seconds: the latter are scaled so that all rise together sensibly."""
    if transfers == len(flows):
        return solve(flows, network.capacity, slot)
    scale = max(float(flows.amount[:transfers].max(initial=0.0)), 1.0) / float(flows.amount[transfers:].max())
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
    rate = c.local.rate if c.nic is None else c.nic.rate * c.nic.per_node / c.gpus_per_node
    return (options.engines - 1) * options.bucket / rate


def _local(network: Network, nbytes: Floats, first: int, per_byte: float, slot: float) -> tuple[Solution, float]:
    """Work of rollout ranks on their own memory."""
    who = np.flatnonzero(nbytes > 0)
    if not len(who):
        return Solution(np.zeros(len(nbytes)), ()), 0.0
    resource, coef = network.work(who + first, np.full(len(who), per_byte), network.width)
    solution = solve(Flows(nbytes[who], resource, coef), network.capacity, slot)
    finish = np.zeros(len(nbytes))
    finish[who] = solution.finish
    return Solution(finish, solution.steps), solution.seconds


def _bound(work: Work, network: Network, options: Options) -> tuple[float, str]:
    """Bytes over the narrowest cut: each rollout rank's own way in, all ways out of the trainer, each link between leaves.

    With relay the trainer's side need send one engine's share only. Which trainer rank sends what is the planner's choice, so
    only their sum counts.
    """
    c, p = network.cluster, network.placement
    sources = np.unique(np.concatenate([r.source for r in work.rounds]))
    nodes = np.unique(p.node[: work.trainers])
    near_in = c.local.rate
    nic_in = c.nic.rate * max(1.0, c.nic.per_node / c.gpus_per_node) if c.nic is not None else near_in
    # A rank reached over both ways at once could take bytes at the sum of both.
    both = np.isin(network.domain[work.trainers :], network.domain[: work.trainers])
    way_in = np.where(both, near_in + (nic_in if c.nic is not None else 0.0), nic_in)
    inward = work.received / way_in
    rank = int(np.argmax(inward))
    candidates = [(float(inward[rank]), f"into rollout rank {rank}")]
    if c.nic is not None:
        if not both.any():
            share = 1 / options.engines if options.relay else 1.0
            out = c.nic.rate * c.nic.per_node * len(nodes)
            candidates.append((work.nbytes * share / out, "out of the trainer's nodes"))
    else:
        candidates.append((work.nbytes / (near_in * len(sources)), "out of the trainer's ranks"))
    return max(candidates)


def _limit(network: Network, phases: dict[str, float], heaviest: Floats, top: int, seconds: float, bound: float) -> str:
    longest = max(phases, key=lambda name: phases[name])
    if longest != "write" or not heaviest.any():
        words = {
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


def _write_spans(work: Work, round_: Round, flows: Flows, solution: Solution, now: float) -> list[Span]:
    """A bar for each trainer rank until its last byte has left, and for each rollout rank until its last has arrived."""
    pairs = len(round_.source)
    finish = solution.finish
    if len(finish) < pairs or len(flows) < pairs:
        pairs = 0  # relayed: flows are not the round's pairs
    end = np.zeros(work.trainers + work.rollouts)
    sent = np.zeros(work.trainers + work.rollouts)
    np.maximum.at(end, round_.source[:pairs], finish[:pairs])
    np.maximum.at(end, round_.target[:pairs] + work.trainers, finish[:pairs])
    np.add.at(sent, round_.source[:pairs], round_.nbytes[:pairs])
    np.add.at(sent, round_.target[:pairs] + work.trainers, round_.nbytes[:pairs])
    return [Span(_name(work.trainers, i), "write", now, float(end[i]), float(sent[i])) for i in np.flatnonzero(end).tolist()]


def _local_spans(phase: str, solution: Solution, nbytes: Floats, now: float) -> list[Span]:
    return [
        Span(f"rollout {i}", phase, now, float(solution.finish[i]), float(nbytes[i]))
        for i in np.flatnonzero(solution.finish).tolist()
    ]


def _name(trainers: int, i: int) -> str:
    return f"trainer {i}" if i < trainers else f"rollout {i - trainers}"


def _died(
    dead: tuple[int, float], network: Network, options: Options, phases: dict[str, float], spans: list[Span]
) -> tuple[str, float, dict[str, float], list[Span]]:
    """A sync whose engine stops answering while it is written: it fails when the transport says so, and nobody resumes."""
    engine, at = dead
    if not 0 <= engine < options.engines:
        raise ConfigError(f"dead engine {engine}: there are {options.engines}")
    if not at >= 0:
        raise ConfigError(f"dead engine at {at:g} s: must be 0 or later")
    c = network.cluster
    begun = c.control.pause
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
