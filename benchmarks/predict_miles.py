"""Seven published weight updates of miles against the simulator, and what shard-to-shard would take on the same hardware.

    .venv/bin/python benchmarks/predict_miles.py [--fit] [--ours]

Seconds and layouts: docs/advanced/p2p-weight-transfer.md of github.com/radixark/miles (table "Profiling Results": H100 80 GB,
8 x 400 Gb/s a node, buckets of 1 GB, pause excluded, Kimi-K2's replica column with 0.884 s of requantisation on the engine);
attention data-parallelism and pipeline cuts: examples/p2p_weight_transfer there.

Six constants (`collective` in conf/weight_sync/cluster/h100_400g.yaml) are fitted to all fourteen numbers at once; nothing is
set for one row. --fit fits them again, and once more without each row, to see how far off that row is then. --ours also
plans and simulates shard-to-shard (half a minute).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from weight_sync.config import engine_yaml, family_yaml
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.plan.planner import make_plan
from weight_sync.plan.schedule import CostModel, Schedule, make_schedule
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.simulate import Cluster, Options, load_cluster, predict
from weight_sync.simulate.cluster import Collective
from weight_sync.simulate.strategies import Gathered, broadcast, gathered, replica

FITTED = ("bus", "host", "gather", "tensor", "call", "fixed")
LOW = (30e9, 2e9, 0.02, 1e-6, 1e-6, 0.01)
HIGH = (400e9, 40e9, 1.0, 1e-3, 1e-3, 1.0)


@dataclass(frozen=True)
class Row:
    """One line of the table. replica, broadcast: published seconds. ratios: of what is sent to what is gathered."""

    name: str
    config: str
    family: str
    trainer: Mapping[str, Any]
    rollout: Mapping[str, Any]
    replica: float
    broadcast: float
    layers: int | None = None
    bytes_ratio: float = 1.0
    tensor_ratio: float = 1.0
    post: float = 0.0
    symbols: Mapping[str, int] = field(default_factory=dict)


ROWS = (
    Row(
        "GLM-4.7-Flash",
        "glm_4_7_flash",
        "deepseek_v3",
        {"ranks": 8, "tp": 4, "ep": 8},
        {"tp": 4, "moe_ep": 4, "engines": 2},
        4.229,
        2.5086,
    ),
    Row("GLM-5, 4 layers", "glm_5", "glm5", {"ranks": 8, "tp": 4, "ep": 8}, {"tp": 8, "moe_ep": 8}, 1.2608, 0.7322, layers=4),
    Row(
        "Qwen3-30B-A3B",
        "qwen3_30b_a3b",
        "qwen3_moe",
        {"ranks": 16, "tp": 4, "ep": 8},
        {"tp": 8, "moe_ep": 8, "engines": 2},
        2.1602,
        2.67,
    ),
    Row(
        "GLM-4.5-Air",
        "glm_4_5_air",
        "glm45",
        {"ranks": 32, "pp": 4, "ep": 8, "pipeline": (12, 12, 12, 10)},
        {"tp": 8, "moe_ep": 8, "engines": 4},
        2.6372,
        5.0011,
    ),
    Row(
        "Qwen3-235B-A22B",
        "qwen3_235b_a22b",
        "qwen3_moe",
        {"ranks": 64, "tp": 4, "pp": 4, "cp": 2, "ep": 16, "pipeline": (24, 24, 24, 22)},
        {"tp": 32, "moe_ep": 32, "engines": 2},
        3.162,
        10.7536,
    ),
    Row(
        "GLM-5",
        "glm_5",
        "glm5",
        {"ranks": 128, "tp": 4, "pp": 8, "cp": 2, "ep": 16, "pipeline": (10,) * 7 + (8,)},
        {"tp": 64, "moe_ep": 64, "attn_dp": 64, "engines": 2},
        8.4797,
        58.3015,
    ),
    # fp8 with one fp32 scale for 64 x 64 values, so twice the tensors; embeddings, head and norms stay bf16.
    Row(
        "Kimi-K2",
        "kimi_k2",
        "kimi_k2",
        {"ranks": 256, "tp": 8, "pp": 8, "cp": 4, "ep": 32, "pipeline": (8,) * 7 + (5,)},
        {"tp": 32, "moe_ep": 32, "attn_dp": 8, "engines": 8},
        7.2273,
        53.2791,
        bytes_ratio=0.51,
        tensor_ratio=2.0,
        post=0.884,
    ),
)


def sides(row: Row, *, engines: int | None = None) -> tuple[Declared, Declared, TrainerDims, EngineDims]:
    """Declared sides of a row (engines: plan only so many of its engines) and its full dims."""
    file = resources.files("weight_sync_conf").joinpath("weight_sync", "model_config", f"{row.config}.json")
    config = json.loads(file.read_text())
    family, engine = family_yaml(row.family), engine_yaml("sglang")
    # Layer counts change with `layers`; per-layer lists are cut. A family is matched by architecture, GLM-4.7-Flash has
    # DeepSeek-V3's tensors under another name.
    if row.layers is not None:
        config = {k: v[: row.layers] if isinstance(v, list) and k.endswith("_types") else v for k, v in config.items()}
        config |= {"num_hidden_layers": row.layers, "num_nextn_predict_layers": 0}
    if not set(config["architectures"]) & set(family["architectures"]):
        config = {**config, "architectures": [family["architectures"][0]]}
    trainer, rollout = TrainerDims(**row.trainer), EngineDims(remainder=engine["remainder"], **row.rollout)
    source = Declared(family, config, dict(row.trainer), None, {"vocab_multiple": 16 * trainer.tp, **row.symbols})
    target = {**row.rollout, "remainder": engine["remainder"]} | ({"engines": engines} if engines else {})
    return source, Declared(family, config, target, engine), trainer, rollout


def facts(row: Row) -> Gathered:
    """What the gathering strategies move in a row: planned for one engine, as the others are its copies."""
    source, target, trainer, rollout = sides(row, engines=1)
    return gathered(make_plan(layout_of(source, "trainer"), layout_of(target, "rollout")), trainer, rollout)


def schedule(row: Row) -> Schedule:
    """Shard-to-shard of a row, with costs as on a GPU: copying is fast, a write costs microseconds."""
    source, target, *_ = sides(row)
    cluster = load_cluster("h100_400g")
    costs = CostModel(cluster.writes.seconds, cluster.nic.rate if cluster.nic else cluster.local.rate, cluster.copy_rate)
    return make_schedule(make_plan(layout_of(source, "trainer"), layout_of(target, "rollout")), costs)


def published(rows: Sequence[Row]) -> np.ndarray:
    return np.array([(row.replica, row.broadcast) for row in rows])


def simulated(rows: Sequence[Row], known: Mapping[str, Gathered], cluster: Cluster) -> np.ndarray:
    """[rows, 2] seconds of replica and broadcast."""
    return np.array([
        (
            replica(known[r.name], cluster, bytes_ratio=r.bytes_ratio, post=r.post).seconds,
            broadcast(known[r.name], cluster, bytes_ratio=r.bytes_ratio, tensor_ratio=r.tensor_ratio).seconds,
        )
        for r in rows
    ])  # fmt: skip


def with_constants(cluster: Cluster, values: Sequence[float]) -> Cluster:
    assert cluster.collective is not None
    new = Collective(poll=cluster.collective.poll, **dict(zip(FITTED, values, strict=True)))
    return cluster.model_copy(update={"collective": new})


def fit(rows: Sequence[Row], known: Mapping[str, Gathered], cluster: Cluster, starts: Sequence[np.ndarray]) -> np.ndarray:
    """The constants that make log errors of both times and of their ratio least squares, with the faster one right in each row
    and rows in their order where they differ by a quarter (each that is wrong costs as much as an error by a factor of e).
    Pattern search from `starts`."""
    want = np.log(published(rows))
    order = want - want[:, None] > np.log(1.25)  # [slower row's place, faster row's, strategy] turned about

    def loss(x: np.ndarray) -> float:
        got = np.log(simulated(rows, known, with_constants(cluster, np.exp(x).tolist())))
        off = got - want
        wrong = np.sign(want[:, 0] - want[:, 1]) * (got[:, 0] - got[:, 1]) < 0.02
        swapped = order & (got - got[:, None] < 0.01)
        return float((off**2).sum() + ((off[:, 0] - off[:, 1]) ** 2).sum() + wrong.sum() + swapped.sum())

    low, high = np.log(LOW), np.log(HIGH)
    best: tuple[float, np.ndarray] | None = None
    for start in starts:
        x, value, step = start, loss(start), 0.4
        while step > 0.02:
            better = False
            for i, sign in itertools.product(range(len(x)), (1, -1)):
                y = x.copy()
                y[i] = np.clip(y[i] + sign * step, low[i], high[i])
                if (new := loss(y)) < value - 1e-9:
                    x, value, better = y, new, True
            step = step if better else step / 2
        if best is None or value < best[0]:
            best = value, x
    assert best is not None
    return np.exp(best[1])


def table(rows: Sequence[Row], got: np.ndarray) -> list[str]:
    """Lines: published and simulated seconds, error, and whether the faster one is the same."""
    lines = [f"{'':16} {'replica s':>22} {'broadcast s':>24} {'faster':>10} {'speed-up':>16}"]
    for row, (a, b) in zip(rows, got.tolist(), strict=True):
        said = "replica" if a < b else "broadcast"
        true = "replica" if row.replica < row.broadcast else "broadcast"
        lines.append(
            f"{row.name:16} {row.replica:7.2f} {a:7.2f} {100 * (a / row.replica - 1):+5.0f}% "
            f"{row.broadcast:8.2f} {b:7.2f} {100 * (b / row.broadcast - 1):+5.0f}% "
            f"{said if said == true else 'WRONG':>10} {row.broadcast / row.replica:7.2f} {b / a:7.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, with leave-one-out errors")
    parser.add_argument("--ours", action="store_true", help="also plan and simulate shard-to-shard")
    options = parser.parse_args()
    cluster = load_cluster("h100_400g")
    assert cluster.collective is not None
    known = {row.name: facts(row) for row in ROWS}
    print("published, simulated, error; constants of conf/weight_sync/cluster/h100_400g.yaml")
    print("\n".join(table(ROWS, simulated(ROWS, known, cluster))))
    if options.fit:
        random = np.random.default_rng(0)
        here = np.log([getattr(cluster.collective, name) for name in FITTED])
        starts = [here, *(random.uniform(np.log(LOW), np.log(HIGH)) for _ in range(4))]
        values = fit(ROWS, known, cluster, starts)
        print("\nfitted again:", ", ".join(f"{n}={v:.3g}" for n, v in zip(FITTED, values, strict=True)))
        print("\n".join(table(ROWS, simulated(ROWS, known, with_constants(cluster, values.tolist())))))
        print("\neach row by constants fitted without it")
        left_out = []
        for row in ROWS:
            others = fit([r for r in ROWS if r is not row], known, cluster, [np.log(values)])
            left_out.append(simulated([row], known, with_constants(cluster, others.tolist()))[0])
        print("\n".join(table(ROWS, np.array(left_out))))
    if options.ours:
        print(f"\n{'shard to shard':16} {'seconds':>8} {'bound':>7}  limit")
        for row in ROWS:
            said = predict(schedule(row), cluster, Options(steps=40))
            note = " (bf16 weights)" if row.bytes_ratio != 1 else ""
            print(f"{row.name:16} {said.seconds:8.2f} {said.bound_seconds:7.2f}  {said.limit}{note}", flush=True)
            if row.bytes_ratio != 1:
                said = predict(schedule(row), cluster, Options(steps=40, bytes_ratio=row.bytes_ratio))
                print(f"{'  as fp8':16} {said.seconds:8.2f} {said.bound_seconds:7.2f}  {said.limit}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
