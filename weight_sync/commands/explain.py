"""python -m weight_sync explain WHAT [+recipes=NAME] [overrides] [rows=N]
python -m weight_sync explain WHAT plan=FILE [cluster=NAME] [transport=rdma] [rows=N]

WHAT is one of
  model.layers.0.self_attn.q_proj.weight   a tensor: which box goes from which rank to which, and why from that one
  trainer:17, rollout:3                    a rank: what it sends or receives, to and from whom, for which parameters
  trainer:17-rollout:3, node0-node4        a link: between two ranks or two hosts
  "node 4 nic 0 out"                       a network card of a cluster, as `plan` names the critical link (needs cluster=)
plan=FILE explains a plan that `plan save=FILE` made; which cards it uses depends on the transport, which it does not hold: with
rdma bytes within a node go through them, too. rows: how many transfers of a tensor are listed (20).
"""

from __future__ import annotations

import re

import numpy as np

from weight_sync.commands.common import job_of, words_of
from weight_sync.commands.described import transport_of
from weight_sync.commands.saved import load
from weight_sync.errors import ConfigError, listed
from weight_sync.ids import Side
from weight_sync.layout.table import Ints, Layout
from weight_sync.plan.explain import explain_rank, explain_rows, explain_tensor
from weight_sync.plan.figures import transfer_runs
from weight_sync.plan.picture import numbers_text, tensor_picture
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Method, Schedule

_RANK = re.compile(r"(trainer|rollout):(\d+)")
_LINK = re.compile(r"trainer:(\d+)-rollout:(\d+)")
_CARD = re.compile(r"node (\d+) nic (\d+) (in|out)")


def run(words: list[str]) -> int:
    if not words or "=" in words[0]:
        raise ConfigError(
            "explain what? First comes an HF tensor name, trainer:17, rollout:3, trainer:17-rollout:3 or node0-node4"
        )
    what = words[0]
    found, overrides = words_of(words[1:], "plan", "rows", "transport")
    rows = found.get("rows", "20")
    if not rows.isdigit():
        raise ConfigError(f"rows={rows}: must be a number")
    source: Layout | None = None
    cluster: str | None = None
    transport = found.get("transport", "")
    if transport and "plan" not in found:
        raise ConfigError(f"transport={transport}: belongs to plan=FILE; a job has its own")
    if "plan" in found:
        cluster = words_of(overrides, "cluster")[0].get("cluster")
        if rest := words_of(overrides, "cluster")[1]:
            raise ConfigError(f"plan={found['plan']} is a whole plan; it takes no overrides, got {' '.join(rest)}")
        schedule = load(found["plan"])
    else:
        job = job_of(overrides)
        layouts = job.inputs.layouts()
        schedule, source, cluster, transport = job.inputs.schedule(layouts), layouts[0], job.conf.cluster, transport_of(job)
    print(explained(schedule, what, source, cluster, int(rows), transport))
    return 0


def explained(schedule: Schedule, what: str, source: Layout | None, cluster: str | None, rows: int, transport: str = "") -> str:
    """The text for one of the forms in the module docstring. source: the trainer's layout, for who else holds a box.

    transport: in one word, where it is known: rdma uses network cards within a node, too.
    """
    plan = schedule.plan
    if match := _LINK.fullmatch(what):
        a, b = int(match[1]), int(match[2])
        for side, rank, world in (("trainer", a, plan.source_world), ("rollout", b, plan.target_world)):
            if rank >= world:
                raise ConfigError(f"{what}: {side} rank {rank} is outside the world of {world}")
        return _rows(schedule, np.flatnonzero((plan.source_rank == a) & (plan.target_rank == b)), what)
    if match := _RANK.fullmatch(what):
        side, rank = Side(match[1]), int(match[2])
        text = explain_rank(plan, side, rank)
        mine = plan.rows_from(rank) if side is Side.TRAINER else plan.rows_to(rank)
        head, *lines = text.split("\n")
        return "\n".join([_rows(schedule, mine, head.partition(" sends ")[0].partition(" receives ")[0]), *_some(lines, rows)])
    if match := _CARD.fullmatch(what):
        return _rows(schedule, _through(plan, cluster, transport, int(match[1]), int(match[2]), match[3]), what)
    hosts = {*plan.source_hosts, *plan.target_hosts} - {""}
    first, dash, second = what.partition("-")
    if dash and first in hosts and second in hosts:
        names = np.asarray(plan.source_hosts)[plan.source_rank], np.asarray(plan.target_hosts)[plan.target_rank]
        return _rows(schedule, np.flatnonzero((names[0] == first) & (names[1] == second)), what)
    if what not in plan.catalog.ids and re.fullmatch(r"[\w.]*-[\w.]*", what):
        raise ConfigError(f"{what}: no such hosts; there are {listed(sorted(hosts)) or 'none known (plan.gpus_per_node)'}")
    return _tensor(schedule, what, source, rows)


def _tensor(schedule: Schedule, name: str, source: Layout | None, rows: int) -> str:
    plan = schedule.plan
    head, *lines = explain_tensor(plan, name, source).split("\n")
    tensor = plan.catalog.ids[name]
    picture = tensor_picture(plan, tensor, source)
    at = np.flatnonzero(plan.tensor == tensor)
    if not picture and len(at):
        held = at if source is None else np.flatnonzero(source.tensor == plan.catalog.base[tensor])
        trainer = (plan.source_rank if source is None else source.rank)[held]
        picture = [
            f"  whole on trainer ranks {numbers_text(trainer.tolist())}",
            f"  whole on rollout ranks {numbers_text(plan.target_rank[at].tolist())}",
        ]
    return "\n".join([head, *picture, *_some(lines, rows), *_methods(schedule, at)])


def _rows(schedule: Schedule, rows: Ints, title: str) -> str:
    direct = rows[schedule.method[rows] == Method.DIRECT]
    written = int(transfer_runs(schedule.plan, direct)[0].sum()) + int(np.isin(schedule.pieces.row, rows).sum())
    return "\n".join([explain_rows(schedule.plan, rows, title, written), *_methods(schedule, rows)])


def _methods(schedule: Schedule, rows: Ints) -> list[str]:
    """How the transfers travel, and for each way the reason of the first that goes it."""
    lines: list[str] = []
    for method in Method:
        mine = rows[schedule.method[rows] == method]
        if len(mine):
            lines.append(f"{method.name.lower()}: {len(mine)} transfer{'' if len(mine) == 1 else 's'}; the first is "
                         f"{schedule.reason(int(mine[0]))}")  # fmt: skip
    return lines


def _some(lines: list[str], limit: int) -> list[str]:
    return lines if len(lines) <= limit else [*lines[:limit], f"  ... and {len(lines) - limit} more lines (rows={len(lines)})"]


def _through(plan: Plan, cluster: str | None, transport: str, node: int, card: int, way: str) -> Ints:
    """The transfers that a network card carries, as the simulator places ranks and cards."""
    from weight_sync.simulate import Faults, load_cluster
    from weight_sync.simulate.network import Network, place

    if cluster is None:
        raise ConfigError("a network card belongs to a cluster: say which, cluster=NAME")
    described = load_cluster(cluster)
    if described.nic is None:
        raise ConfigError(f"cluster {cluster} has no network cards")
    placement = place(described, plan.source_world, plan.target_world, [*plan.source_hosts, *plan.target_hosts])
    network = Network(described, placement, Faults(), transport)
    cards = placement.gpu * described.nic.per_node // described.gpus_per_node
    mine = (placement.node == node) & (cards == card)
    if not mine.any():
        raise ConfigError(f"no rank uses card {card} of node {node}; there are nodes 0 to {int(placement.node.max())}")
    source, target = plan.source_rank, plan.target_rank + plan.source_world
    return np.flatnonzero(mine[source if way == "out" else target] & ~network.near(source, target))
