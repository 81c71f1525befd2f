"""What a sync will take on a described cluster: predict(schedule, cluster) for a number, simulate() for all of it."""

from weight_sync.simulate.cluster import Cluster, cluster_names, load_cluster
from weight_sync.simulate.network import Faults, Slow
from weight_sync.simulate.sync import Options, Prediction, Simulation, simulate
from weight_sync.simulate.sync import predict as predict

__all__ = [
    "Cluster", "Faults", "Options", "Prediction", "Simulation", "Slow", "cluster_names", "load_cluster", "predict", "simulate",
]  # fmt: skip
