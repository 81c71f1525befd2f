"""Writes and whole syncs measured between two H200 over NVLink, against the simulator.

    .venv/bin/python benchmarks/predict_nvlink.py [--same FILE] [--scatter FILE] [--tiny FILE] [--fp8 FILE] [--cluster FILE]

Without words: the runs recorded below (those of benchmarks/gpu_notes.md) against conf/weight_sync/cluster/h200.yaml.

    --same, --scatter, --tiny FILE   what gpu_p2p.py --json wrote for that case; --fp8: what gpu_fp8.py --json wrote
    --cluster FILE                   numbers of the machine they ran on, from `bench link transport=ipc out=FILE`

Two kinds of things are predicted. Lists of writes alone (Mooncake nvlink_intra, one copy for each region), by the rate of one
copy and the 3.7 us of a write. And our whole session over cuda_ipc as those benchmarks run it, pause to resume with every byte
digested on both GPUs, in bf16 and quantised to fp8 at the source.

Where the parameters are from. Measured apart from whole syncs: the rates of copy engines, of our kernel, of digests, of looking
and quantising, each alone. Read off the case `tiny` (as many transfers, 1% of the bytes): seconds of Python for each parameter
and transfer; --tiny reads them off that file instead. Read off phases of the predicted runs themselves: CALLS, what calls to
the benchmarks' doubles over pipes take, 7 ms together. Nothing is fitted to a total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import gpu_p2p

from weight_sync.config import quant_yaml
from weight_sync.plan.planner import make_plan
from weight_sync.plan.schedule import Budget, make_schedule
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import Excludes
from weight_sync.quant.scheme import load_scheme
from weight_sync.session.inputs import Declared, layout_of
from weight_sync.simulate import Cluster, Faults, Options, load_cluster
from weight_sync.simulate.cluster import Control
from weight_sync.simulate.network import Network, place
from weight_sync.simulate.sync import Prediction, run
from weight_sync.simulate.work import Items, Round, Work, work_of

# -- lists of writes -----------------------------------------------------------------------------------------------------

NBYTES, WRITES = 61.06e9, 13155
MEASURED = {1: (0.196, 0.212), 2: (0.183, 0.183), 4: (0.172, 0.172)}
"""Threads that share one Mooncake engine -> seconds, least and most."""


def predicted(threads: int, cluster: Cluster | None = None) -> float:
    """Seconds of writing on two neighbouring GPUs."""
    cluster = cluster or load_cluster("h200")
    cluster = cluster.model_copy(update={"writes": cluster.writes.model_copy(update={"threads": threads})})
    one, none = np.zeros(1, np.int64), np.zeros(1)
    work = Work(1, 1, (Round(one, one, np.array([NBYTES]), np.array([float(WRITES)]), none, none),), none, none, 1)
    network = Network(cluster, place(cluster, 1, 1, share_nodes=True), Faults(), "nvlink")
    return run(work, network, Options(verify=False)).prediction.phases["write"] - cluster.control.round


# -- whole sessions ------------------------------------------------------------------------------------------------------

CALLS = Control(pause=0.0024, round=0.0015, verify=0.0015, finish=0.0018)
"""What calls to the benchmarks' two processes take. pause: fp8's, in which nothing else is. round: a write phase is 1.0 to 2.4
ms longer than on the rank. verify: likewise bf16's, by a profile. finish: commit and resume of same and fp8; scatter, with
eight ranks, took 0.0043. Engines behind HTTP take longer: conf/weight_sync/cluster has those."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Medians of a run. case: of gpu_p2p.py, or fp8."""

    case: str
    layers: int
    seconds: float
    phases: Mapping[str, float]


RECORDED = {
    "same": Recorded("same", 48, 0.1918, {"pause": 0.0089, "write": 0.1573, "verify": 0.0227, "finish": 0.0018}),
    "same, quiet host": Recorded("same", 48, 0.1864, {"pause": 0.0065, "write": 0.1568, "verify": 0.0209, "finish": 0.0015}),
    "fp8, quiet host": Recorded(
        "fp8", 48, 0.1328, {"quantise": 0.0212, "pause": 0.0024, "write": 0.0869, "verify": 0.0156, "finish": 0.0018}
    ),
    "scatter": Recorded("scatter", 24, 0.1273, {"pause": 0.0089, "write": 0.0889, "verify": 0.0254, "finish": 0.0043}),
    "tiny": Recorded("tiny", 48, 0.0259, {"pause": 0.0070, "write": 0.0097, "verify": 0.0072, "finish": 0.0016}),
    "same, later": Recorded("same", 48, 0.1922, {"pause": 0.0108, "write": 0.1572, "verify": 0.0210, "finish": 0.0021}),
    "fp8, later, quiet host": Recorded(
        "fp8", 48, 0.1267, {"quantise": 0.0210, "pause": 0.0025, "write": 0.0864, "verify": 0.0141, "finish": 0.0015}
    ),
    "fp8, later": Recorded(
        "fp8", 48, 0.1343, {"quantise": 0.0228, "pause": 0.0035, "write": 0.0883, "verify": 0.0148, "finish": 0.0023}
    ),
    "scatter, later": Recorded("scatter", 24, 0.1290, {"pause": 0.0104, "write": 0.0881, "verify": 0.0257, "finish": 0.0049}),
}
"""Runs on several hosts of one kind; `tiny` shows the constants that were read off it, no more. Those called later are of newer
code, and nothing was read off them."""
SLOW = {
    "gather, later": Recorded("gather", 24, 0.1572, {"pause": 0.0242, "write": 0.1077, "verify": 0.0203, "finish": 0.0019}),
    "fp8, a compiler beside it": Recorded(
        "fp8", 48, 0.2105, {"quantise": 0.0237, "pause": 0.0027, "write": 0.1638, "verify": 0.0173, "finish": 0.0019}
    ),
    "fp8, slower host": Recorded(
        "fp8", 48, 0.2337, {"quantise": 0.0251, "pause": 0.0033, "write": 0.1857, "verify": 0.0160, "finish": 0.0022}
    ),
}
"""What the model does not have: eight trainer ranks whose Python shares one process, and Python that asks for each staging
buffer, which was too slow for the wire on such hosts before the later runs."""


def sides(case: str, layers: int, block: int = 128) -> tuple[Declared, Declared]:
    if case != "fp8":
        return gpu_p2p.specs(layers, case)
    source, target = gpu_p2p.specs(layers, "same")
    quant = Quantisation(load_scheme("fp8_block", quant_yaml, {"group": [block, block]}), Excludes("fp8")).to_json()
    return replace(source, quant=quant), replace(target, quant=quant)


def work(case: str, layers: int) -> Work:
    """A case's work. All ranks of a side are in one process on one GPU there, so they are one rank here."""
    source, target = sides(case, layers)
    budget = Budget(512 << 20, 512 << 20) if case == "fp8" else Budget()
    plan = make_plan(layout_of(source, "trainer"), layout_of(target, "rollout"))
    return _folded(work_of(make_schedule(plan, gpu_p2p.COSTS["ours"], budget)))


def _folded(many: Work) -> Work:
    """The same as one rank to one rank."""
    zero = np.zeros(1, np.int64)

    def total(values: np.ndarray | None) -> np.ndarray:
        return np.array([0.0 if values is None else float(values.sum())])

    def round_(r: Round) -> Round:
        sent = np.bincount(r.source, r.nbytes, many.trainers)
        staged = None if r.staged is None else total(r.staged * sent) / max(float(sent.sum()), 1.0)
        nbytes, writes, packed, placed, made, long = map(total, (r.nbytes, r.writes, r.packed, r.placed, r.made, r.long))
        return Round(zero, zero, nbytes, writes, packed, placed, made, staged, long)

    items = many.items
    assert items is not None
    return Work(
        1, 1, tuple(map(round_, many.rounds)), total(many.sent), total(many.received), many.transfers,
        Items(total(items.params), total(items.sends), total(items.looked), total(items.receives)),
    )  # fmt: skip


def session(many: Work, cluster: Cluster) -> Prediction:
    """Our whole session on two neighbouring GPUs, with calls as the benchmarks' doubles take them."""
    control = CALLS.model_copy(update={"compare": cluster.control.compare})
    cluster = cluster.model_copy(update={"control": control})
    network = Network(cluster, place(cluster, 1, 1, share_nodes=True), Faults(), "ipc")
    return run(many, network, Options(transport="ipc")).prediction


def from_tiny(cluster: Cluster, many: Work, phases: Mapping[str, float]) -> Cluster:
    """The cluster with Python's seconds as a run of the case `tiny` has them.

    phases: medians of that run. Its bytes (1% of those of `same`) are taken off at the cluster's rates.
    """
    assert many.items is not None
    params, transfers = float(many.items.params.sum()), float(many.transfers)
    wire = many.nbytes / (cluster.local.ipc or cluster.local.rate)
    check = max(phases["pause"] - CALLS.pause, 0.0) / params
    send = max(phases["write on ranks"] - max(wire, check * params), 0.0) / transfers
    verify = max(phases["verify"] - CALLS.verify - many.nbytes / cluster.digest_target, 0.0) / transfers
    python = cluster.python.model_copy(
        update={"check": check, "send": send, "receive": max(verify - cluster.control.compare, 0.0)}
    )
    return cluster.model_copy(update={"python": python})


def compared(name: str, run: Recorded, cluster: Cluster) -> float:
    """Print a run, predicted and measured; the error as a share."""
    many = work(run.case, run.layers)
    said = session(many, cluster)
    total, seconds, phases = said.seconds, run.seconds, run.phases
    error = total / seconds - 1
    print(f"{name}: {many.nbytes / 1e9:.2f} GB, {many.transfers} transfers: measured {seconds:.3f} s, predicted {total:.3f} s "
          f"({100 * error:+.0f}%), limit: {said.limit}")  # fmt: skip
    for phase, value in said.phases.items():
        if value or phase in phases:
            print(f"    {phase:9} predicted {value:.4f}" + (f", measured {phases[phase]:.4f}" if phase in phases else ""))
    return error


def recorded_error(name: str) -> float:
    """Of a recorded run, by h200.yaml; prints it."""
    return compared(name, RECORDED[name], load_cluster("h200"))


def of_file(path: Path) -> tuple[float, dict[str, float]]:
    """(median seconds, medians of phases) of ours in a benchmark's JSON; fp8's where it has both."""
    data: dict[str, Any] = json.loads(path.read_text())
    name = "fp8" if "fp8" in data["seconds"] else "ours"
    phases = data["phases"][name]
    known = {k: v for k, v in phases.items() if "on ranks" not in k and k not in ("commit", "resume")}
    ranks = {k: v for k, v in phases.items() if "on ranks" in k}
    return statistics.median(data["seconds"][name]), known | ranks | {"finish": phases["commit"] + phases["resume"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for case in ("same", "scatter", "tiny", "fp8"):
        parser.add_argument(f"--{case}", type=Path)
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    given = {case: file for case in ("same", "scatter", "fp8") if (file := getattr(options, case)) is not None}
    if options.tiny is not None:
        cluster = from_tiny(cluster, work("tiny", options.layers), of_file(options.tiny)[1])
        said = ", ".join(f"{name} {value * 1e6:.3f} us" for name, value in cluster.python.model_dump().items())
        print(f"Python, from {options.tiny}: {said}")
    if given:
        for case, file in given.items():
            compared(case, Recorded(case, options.layers, *of_file(file)), cluster)
        return
    print("lists of writes, Mooncake nvlink_intra")
    for threads, (low, high) in MEASURED.items():
        said, middle = predicted(threads, cluster), (low + high) / 2
        print(
            f"{threads} threads: measured {low:.3f} to {high:.3f} s, predicted {said:.3f} s ({100 * (said / middle - 1):+.0f}%)"
        )
    print("\nwhole sessions, cuda_ipc")
    for name, recorded in (RECORDED | SLOW).items():
        compared(name, recorded, cluster)


if __name__ == "__main__":
    main()
