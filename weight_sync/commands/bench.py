"""python -m weight_sync bench link [transport=NAME] [bytes=N] [name=NAME] [out=FILE.yaml] [output=table|json]

Measure what this machine reaches between its own processes, and write it as a cluster file, which `plan`, `simulate` and
`search` take as cluster=FILE.yaml: wire rate, seconds of a write, hashing, copying, quantising, cores, and what Python costs
for each parameter and transfer. Takes some twenty seconds; a machine that is busy with other things measures slow.

transport: tcp (the default) and cma between processes on CPUs; rdma through the network card, to itself; ipc and nvlink from
one GPU to another (torch and triton are needed). bytes: buffer of each process (default 256 MiB, on GPUs 4 GiB).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from weight_sync.commands.common import output_of, words_of
from weight_sync.commands.link import as_yaml, cluster_of, measure
from weight_sync.errors import ConfigError


def run(words: list[str]) -> int:
    output, rest = output_of(words)
    if not rest or rest[0] != "link":
        raise ConfigError(f"bench measures: link; got {' '.join(rest) or 'nothing'}")
    given, unknown = words_of(rest[1:], "transport", "bytes", "name", "out")
    if unknown:
        raise ConfigError(f"bench link does not know {' '.join(unknown)}; it takes transport=, bytes=, name=, out=, output=")
    size = given.get("bytes")
    if size is not None and not size.isdigit():
        raise ConfigError(f"bytes={size}: must be a whole number")
    out = given.get("out")
    if out is not None and not out.endswith((".yaml", ".yml")):
        raise ConfigError(f"out={out}: must end in .yaml, or cluster=FILE would not take it for a file")
    transport = given.get("transport", "tcp")
    link = measure(transport, None if size is None else int(size))
    cluster = cluster_of(link, given.get("name", "this_machine"), transport)
    if out is not None:
        Path(out).write_text(as_yaml(cluster))
    if output == "json":
        print(json.dumps({"measured": asdict(link), "cluster": cluster.model_dump(), "out": out}))
        return 0
    for text, value, unit in (
        ("one process to another", link.pair / 1e9, "GB/s"),
        ("two pairs at once, together", link.pairs / 1e9, "GB/s"),
        ("core seconds for a GB on the wire", link.wire * 1e9, "s"),
        ("a 4 KB write beyond its bytes", link.write * 1e6, "us"),
        ("hashing, one thread", link.digest / 1e9, "GB/s"),
        ("hashing, all cores", link.digests / 1e9, "GB/s"),
        ("strided copy, one thread", link.copy / 1e9, "GB/s"),
        ("weights looked at before a pause", link.look / 1e9, "GB/s"),
        ("quantising, read and written", link.make / 1e9, "GB/s"),
        ("a parameter checked", link.check * 1e6, "us"),
        ("a transfer on its trainer rank", link.send * 1e6, "us"),
        ("a transfer on its engine worker", link.receive * 1e6, "us"),
        ("a transfer on the controller", link.compare * 1e6, "us"),
        ("a call to a process and back", link.call * 1e6, "us"),
    ):
        print(f"{text:36} {value:8.3g} {unit}")
    print(f"written to {out}" if out else as_yaml(cluster), end="\n" if out else "")
    return 0
