"""Reads an offline wandb run back, so that tests see what `wandb sync` would upload.

The file is a LevelDB-style log (github.com/google/leveldb, doc/log_format.md) after a 7-byte header: blocks of 32 KiB,
each a series of chunks (checksum 4, length 2 little-endian, type 1, data); types 1 full, 2 first, 3 middle, 4 last. Each
record is a protobuf message that wandb itself ships.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is no wandb run file")
    position, parts = HEADER, []
    while position < len(data):
        if BLOCK - position % BLOCK < HEADER:  # the tail of a block that cannot hold a chunk header
            position += BLOCK - position % BLOCK
            continue
        if len(data) - position < HEADER:  # still being written
            return
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if len(data) - position - HEADER < length:
            return
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def finished_records(path: Path, seconds: float = 30.0) -> list[Any]:
    """All records, once the run's exit record is on disk: wandb 0.31 still writes for a moment after finish() returned."""
    until = time.monotonic() + seconds
    while True:
        found = list(records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        if time.monotonic() > until:
            raise TimeoutError(f"{path}: no exit record within {seconds} s, only {len(found)} records")
        time.sleep(0.05)


def contents(directory: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any], dict[str, Any], int]:
    """(rows by step, summary, config, exit code) of the only offline run under `directory`."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    rows: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    code = -1
    for record in finished_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.setdefault(record.history.step.num, {}).update(row)
        elif kind == "summary":
            summary.update({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update})
        elif kind == "run":
            config.update({i.key: json.loads(i.value_json) for i in record.run.config.update})
        elif kind == "exit":
            code = record.exit.exit_code
    return rows, summary, config, code
