"""Deltas in an engine worker: messages in the staging buffer become words of live parameters.

TargetAgent calls patch() inside a session. All messages of a call are read and checked before the first word changes; what is
then in the parameters is proved by the session's digests of all bytes, as ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from weight_sync.delta.codec import Change, decode
from weight_sync.delta.message import Label
from weight_sync.delta.spec import Base
from weight_sync.device.tables import Box
from weight_sync.errors import DeltaError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.box import row_major
from weight_sync.layout.table import Ints
from weight_sync.session.arrays import on_host
from weight_sync.session.delta_told import DeviceMessage, DevicePlaces
from weight_sync.session.digests import XXH3, box_of
from weight_sync.session.memory import Memory


class DeltaTarget:
    """What one binding of a worker needs to apply messages; made when it is bound, so that nothing is prepared in a pause."""

    def __init__(self, memory: Memory, table: Mapping[str, Any]) -> None:
        self._memory = memory
        sizes = [ITEMSIZE[memory.param(name).dtype] for name in table["params"]]
        elements = [prod(shape) for shape in table["shape"]]
        self._transfers = np.stack([np.asarray(elements, np.int64), np.asarray(sizes, np.int64)], axis=1).reshape(-1, 2)
        self._device = None if memory.device == "cpu" else DevicePlaces(boxes_of(memory, table), memory.on)

    def patch(
        self, table: Mapping[str, Any], stage: Any, held: tuple[str, int] | None, epoch: int, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Apply the messages [source rank, byte of the staging buffer, bytes] of payload["messages"].

        table: the target_table() that is bound, under the name that its plan has now. held: session and version that were last
        finished here. epoch: of the binding. Raises DeltaError where the base is another one or a message is not exactly what
        its header says; nothing is changed then.
        """
        begun = time.monotonic()
        memory, base = self._memory, Base.from_json(payload["base"])
        if held != (base.session, base.version):
            here = f"version {held[1]} of session {held[0]}" if held else "no version that was proved"
            raise DeltaError(f"{memory.where}: holds {here}, the delta applies to {base.text()}")
        if stage is None:
            raise DeltaError(f"{memory.where}: was bound without a staging buffer")
        room, kind = stage.storage.nbytes, str(table.get("digest", XXH3))
        changes: list[Change] = []
        told: list[DeviceMessage] = []
        for source, offset, nbytes in payload["messages"]:
            if not 0 <= offset <= offset + nbytes <= room:
                raise DeltaError(
                    f"{memory.where}: a message in bytes [{offset}, {offset + nbytes}) of a staging buffer of {room} bytes"
                )
            label = Label(str(payload["session"]), base, str(table["plan"]), int(source), epoch)
            raw = stage.bytes(int(offset), int(nbytes))
            # Copied: the positions that are checked are those that are used, whatever still arrives in the buffer.
            if self._device is None:
                changes += decode(np.array(raw), label, self._transfers, kind)
            else:
                told.append(DeviceMessage(raw, label, self._transfers, kind, self._device))
                changes += told[-1].others()
        for message in told:
            message.write()
        for change in changes:
            _scatter(memory, table, change)
        memory.settle()
        words = sum(len(change.values) for change in changes) + sum(message.words for message in told)
        return {"words": words, "seconds": time.monotonic() - begun}


def boxes_of(memory: Memory, table: Mapping[str, Any]) -> list[Box]:
    """Where each transfer ends in a GPU's memory."""
    columns = zip(table["params"], table["start"], table["strides"], table["shape"], strict=True)
    return [box_of(memory.view(name, start, strides, shape)) for name, start, strides, shape in columns]


def _scatter(memory: Memory, table: Mapping[str, Any], change: Change) -> None:
    i = change.transfer
    name, start, strides, shape = table["params"][i], table["start"][i], table["strides"][i], table["shape"][i]
    flat = memory.view(name, 0, (1,), (prod(memory.param(name).shape),))
    whole = tuple(s for s, n in zip(strides, shape, strict=True) if n != 1) == tuple(
        s for s, n in zip(row_major(tuple(shape)), shape, strict=True) if n != 1
    )
    if whole and change.positions is None:
        low = start + change.first
        flat[low : low + len(change.values)] = _beside(memory, change.values, flat)
        return
    positions = change.positions
    if positions is None:
        positions = np.arange(change.first, change.first + len(change.values))
    elements = start + (positions if whole else _strided(positions, shape, strides))
    if on_host(flat):
        flat[elements] = change.values
    else:
        flat[memory.beside(elements)] = _beside(memory, change.values, flat)


def _strided(positions: Ints, shape: Any, strides: Any) -> Ints:
    """Elements from the start of a region to its elements at these places of its row-major order."""
    index = np.unravel_index(positions, tuple(shape))
    return sum((part * int(step) for part, step in zip(index, strides, strict=True)), np.zeros(len(positions), np.int64))


def _beside(memory: Memory, values: Any, like: Any) -> Any:
    """Values where the parameters are; torch takes words as signed ones."""
    return values if on_host(like) else memory.beside(values.view(f"i{values.itemsize}" if values.itemsize > 1 else "u1"))
