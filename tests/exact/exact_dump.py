"""A trainer on disk: every storage of every rank as raw bytes, and what the rank says about itself.

Written in the trainer's environment, read in an engine's. Nothing is cut or gathered in between: what is read back are the
same storages, with every parameter at its own offset in them, so a sync from them moves the live trainer's bytes.

    <folder>/rank<n>.json           RankDescription
    <folder>/rank<n>-<i>.bytes      storage i of that rank
    <folder>/export/                the HF checkpoint that the trainer's own exporter makes of the same state
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weight_sync.ids import ITEMSIZE
from weight_sync.layout.box import row_major
from weight_sync.session.contracts import RankDescription, describe_from_json
from weight_sync.session.inprocess import ArraySource, typed

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def write_rank(folder: Path, description: RankDescription) -> None:
    """Read this process's memory at the described addresses and write it down."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, storage in enumerate(description.storages):
        (folder / f"rank{description.rank}-{index}.bytes").write_bytes(ctypes.string_at(storage.address, storage.nbytes))
    (folder / f"rank{description.rank}.json").write_text(json.dumps(asdict(description)))


def read_ranks(folder: Path) -> list[ArraySource]:
    """One TrainerSource for each rank that was written, in rank order."""
    count = len(list(folder.glob("rank*.json")))
    return [_read_rank(folder, rank) for rank in range(count)]


def _read_rank(folder: Path, rank: int) -> ArraySource:
    seen = describe_from_json(json.loads((folder / f"rank{rank}.json").read_text()))
    storages = [np.fromfile(folder / f"rank{rank}-{index}.bytes", np.uint8) for index in range(len(seen.storages))]
    arrays: dict[str, Any] = {}
    for p in seen.params:
        assert p.stride == row_major(p.shape), f"rank {rank}: {p.name} of shape {p.shape} has strides {p.stride}"
        raw = storages[p.storage][p.offset : p.offset + prod(p.shape) * ITEMSIZE[p.dtype]]
        arrays[p.name] = typed(raw.view(_WORDS[ITEMSIZE[p.dtype]]).reshape(p.shape), p.dtype)
    return ArraySource(rank, arrays, seen.coords, seen.host, seen.shards)
