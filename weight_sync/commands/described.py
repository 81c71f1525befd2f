"""The cluster a command predicts for: its file, values that words replace, whether it speaks of the job's transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weight_sync.commands.common import Job
from weight_sync.errors import ConfigError
from weight_sync.simulate import Cluster, load_cluster
from weight_sync.simulate.cluster import transport_name

PREFIX = "cluster."


def cluster_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(values to replace by path, from words such as cluster.fabric.oversubscription=4; the other words)."""
    import yaml

    changes: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.startswith(PREFIX):
            rest.append(word)
            continue
        try:
            changes[key.removeprefix(PREFIX)] = float(value)  # YAML 1.1 takes 1e-5 for a string
        except ValueError:
            changes[key.removeprefix(PREFIX)] = yaml.safe_load(value)
    return changes, rest


def described(job: Job, changes: dict[str, Any], command: str) -> Cluster:
    """The job's cluster with these changes. ConfigError when none is chosen."""
    if job.conf.cluster is None:
        raise ConfigError(f"{command} needs cluster=NAME, or the path of a YAML file")
    return load_cluster(job.conf.cluster, changes)


def transport_of(job: Job) -> str:
    """One word for what moves the job's bytes; "" where no strategy is chosen."""
    transport = job.conf.weight_sync.transport
    return transport_name(transport.name, transport.options) if transport.name else ""


def remark(cluster: Cluster, transport: str) -> str:
    """What to say where a cluster's numbers are of other transports; "" where they are not, or it does not say."""
    if not transport or not cluster.transports or transport in cluster.transports:
        return ""
    return (
        f"the numbers of cluster {cluster.name} are of {', '.join(cluster.transports)}; of {transport}, which this job uses, "
        "they say nothing"
    )
