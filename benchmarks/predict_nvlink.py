"""Writes measured between two H200 over NVLink, against the simulator.

    .venv/bin/python benchmarks/predict_nvlink.py

Measured (Mooncake nvlink_intra, Qwen3-30B-A3B shapes, bf16, one GPU's parameters written into the other's): 61.06 GB in
13,155 writes took 0.196 to 0.212 s, and 0.183 s with two threads, 0.172 s with four, which share one engine; a single copy of
the same bytes 0.156 s. The rate of that copy and the 3.7 us of a write, taken below 4 MB, are the two numbers of
conf/weight_sync/cluster/h200.yaml that matter here. Writes alone were timed: no digest, no pause.
"""

from __future__ import annotations

import numpy as np

from weight_sync.simulate import Cluster, Faults, Options, load_cluster
from weight_sync.simulate.network import Network, place
from weight_sync.simulate.sync import run
from weight_sync.simulate.work import Round, Work

NBYTES, WRITES = 61.06e9, 13155
MEASURED = {1: (0.196, 0.212), 2: (0.183, 0.183), 4: (0.172, 0.172)}


def predicted(threads: int) -> float:
    """Seconds of writing on two neighbouring GPUs."""
    cluster: Cluster = load_cluster("h200")
    cluster = cluster.model_copy(update={"writes": cluster.writes.model_copy(update={"threads": threads})})
    one, none = np.zeros(1, np.int64), np.zeros(1)
    work = Work(1, 1, (Round(one, one, np.array([NBYTES]), np.array([float(WRITES)]), none, none),), none, none, 1)
    network = Network(cluster, place(cluster, 1, 1, share_nodes=True), Faults())
    return run(work, network, Options(verify=False)).prediction.phases["write"] - cluster.control.round


def main() -> None:
    for threads, (low, high) in MEASURED.items():
        said, middle = predicted(threads), (low + high) / 2
        print(
            f"{threads} threads: measured {low:.3f} to {high:.3f} s, predicted {said:.3f} s ({100 * (said / middle - 1):+.0f}%)"
        )


if __name__ == "__main__":
    main()
