"""Run by test_delta_kernels.py with TRITON_INTERPRET=1: changes found, encoded, laid down, checked and written by the kernels.

Everything is compared with numpy, and what the kernels encode is decoded by the host's decoder as well.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weight_sync.delta.codec import TILE, Kind, decode
from weight_sync.delta.message import HEADER_BYTES, LANES, RECORD, RECORD_BYTES, Label, directory_end, head, records_in
from weight_sync.delta.spec import Base
from weight_sync.device.lanes import Lanes
from weight_sync.device.tables import Tables
from weight_sync.errors import BindError, DeltaError
from weight_sync.session.delta_device import DeviceChanges
from weight_sync.session.delta_encoded import Encoded, Message
from weight_sync.session.delta_target import _scatter  # noqa: F401 - imported as the worker does
from weight_sync.session.delta_told import DeviceMessage, DevicePlaces
from weight_sync.session.digests import box_of, digest_of_bytes

LABEL = Label("3-ab-cd", Base("3-ab-ef", 7, "0123456789abcdef" * 2), "plan", 2, 1 << 40)
CPU = torch.device("cpu")
DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Side:
    """Regions of some shapes in one buffer, each with strides of its own."""

    def __init__(self, shapes: list[tuple[int, tuple[int, ...]]], rng: Any, spread: bool) -> None:
        self.views: list[Any] = []
        self.kept: list[Any] = []
        for size, shape in shapes:
            strides, step = [0] * len(shape), 1
            for d in reversed(range(len(shape))):
                last = d == len(shape) - 1
                strides[d] = step
                step *= shape[d] + (0 if last or not spread else int(rng.integers(0, 2)))
                if last and spread and len(shape) > 1:
                    step += 8 // size * int(rng.integers(0, 3))
            words = torch.from_numpy(rng.integers(-100, 100, step + 16).astype(f"i{size}" if size > 1 else "u1"))
            self.kept.append(words)
            self.views.append(words.as_strided(shape, strides, 8 // size))

    def content(self) -> list[Any]:
        return [view.contiguous().view(-1).clone() for view in self.views]


def nudge(view: Any, share: float, rng: Any) -> None:
    flat = view.contiguous().view(-1)
    hit = torch.from_numpy(rng.random(flat.numel()) < share)
    flat[hit] ^= 5
    view.copy_(flat.view(view.shape))


def laid_down(encoded: Encoded, message: int) -> list[Any]:
    """All records as messages to one rank whose transfers are the regions."""
    every, _ = encoded._in_order()
    rooms, low = [], 0
    sizes = [(int(r["index"]) + 7) // 8 * 8 + (int(r["changed"]) * int(r["itemsize"]) + 7) // 8 * 8 + 32 for r in every]
    while low < len(every):
        high, used = low, HEADER_BYTES
        while high < len(every) and (high == low or used + sizes[high] <= message):
            used += sizes[high]
            high += 1
        mine = np.arange(low, high)
        room = torch.full((used,), 0xEE, dtype=torch.uint8)
        encoded.lay_down(room, Message(0, mine, every["transfer"][mine].astype(np.int64), used), LABEL, LANES)
        rooms.append(room)
        low = high
    return rooms


def in_a_buffer(source: Side, made: list[int], start: Any) -> tuple[Any, list[list[tuple[int, int, int, int, int, int]]]]:
    """Regions that are copied into a buffer in two goes, the second of which overwrites the first."""
    buffer = torch.zeros(1 << 17, dtype=torch.uint8)
    plans: list[list[tuple[int, int, int, int]]] = [[], []]  # number, first byte, bytes, byte of the buffer
    for half in (0, 1):
        at = 0
        for i in made:
            size = source.views[i].numel() * source.views[i].element_size()
            cut = size // 3 // 8 * 8
            low, high = (0, cut) if half == 0 else (cut, size)
            plans[half].append((i, low, high - low, at))
            at += high - low

    def fill(half: int) -> None:
        buffer.fill_(0xEE)
        for i, first, nbytes, at in plans[half]:
            raw = source.views[i].contiguous().view(-1).view(torch.uint8)
            buffer[at : at + nbytes] = raw[first : first + nbytes]

    pieces = [
        [
            (i, source.views[i].element_size(), buffer.data_ptr() + at, n, first, int(start[i]) + first)
            for i, first, n, at in plan
        ]
        for plan in plans
    ]
    return fill, pieces


def round_trip(seed: int, shares: list[float], on_host: bool, chunk: int, message: int, filled: bool = False) -> set[int]:
    rng = np.random.default_rng(seed)
    shapes = [
        (2, (33000,)), (2, (3, 5, 64, 40)), (1, (8, 2048)), (4, (5000,)), (8, (1200,)), (2, (256,)), (2, (4,)), (1, (8,)),
        (2, (2, 3, 2, 8, 64)), (4, (2, 255 * 8)), (2, (3,)),
    ]  # fmt: skip
    source, target = Side(shapes, rng, True), Side(shapes, rng, True)
    for a, b in zip(source.views, target.views, strict=True):
        b.copy_(a)
    nbytes = np.asarray([v.numel() * v.element_size() for v in source.views])
    room = -(-nbytes // 64) * 64
    start = np.cumsum(room) - room
    whole = torch.zeros(int(room.sum()), dtype=torch.uint8)
    snapshot = whole.numpy().copy() if on_host else whole
    regions = list(range(len(shapes)))
    found = DeviceChanges(CPU, message, chunk)
    made = [0, 2, 3] if filled else []  # these are brought into a buffer, in pieces, each time before they are looked at
    direct = [i for i in regions if i not in made]
    found.add(direct, [box_of(source.views[i]) for i in direct], start[direct].tolist())
    if filled:
        fill, pieces = in_a_buffer(source, made, start)
        for half in (0, 1):
            found.add_filled(lambda half=half: fill(half), pieces[half])
    odd = len(shapes) - 1
    assert sorted(found.numbers) == [i for i in regions if i != odd], "6 bytes are not whole words"
    found.check({i: int(nbytes[i]) for i in found.numbers})
    copies = np.ones(len(shapes), np.int64)
    found.store(snapshot)
    places = DevicePlaces([box_of(v) for v in target.views])
    transfers = np.asarray([[v.numel(), v.element_size()] for v in source.views], np.int64)
    kinds: set[int] = set()
    for share in shares:
        before = source.content()
        for view in source.views[:-1]:
            nudge(view, share, rng)
        now = source.content()
        encoded = Encoded(1 << 14)
        for part in found.find(snapshot, 1 << 40, copies):
            assert part.bodies is not None
            encoded.add_found(part)
        differing = sum(int((a != b).sum()) for a, b in zip(before, now, strict=True))
        assert differing <= encoded.changed, "at least what changed; all of a tile or record where nearly all did"
        for number, digest in zip(*found.digests(), strict=True):
            naive = Lanes()
            naive.update(now[number].numpy().tobytes())
            assert int(digest) == naive.intdigest(), number
        raw = snapshot if on_host else snapshot.numpy()
        for number in found.numbers:
            held = raw[start[number] : start[number] + nbytes[number]]
            assert (held == now[number].numpy().view(np.uint8)).all(), f"the snapshot of region {number}"
        for room_ in laid_down(encoded, message):
            raw = room_.numpy()
            end = directory_end(records_in(raw[:HEADER_BYTES], LABEL))
            kinds |= set(raw[HEADER_BYTES:end].view(RECORD)["kind"].tolist())
            # As a worker on the host would read it.
            for change in decode(raw, LABEL, transfers, LANES):
                at = slice(change.first, change.first + len(change.values))
                want = now[change.transfer].numpy()
                got = want[at] if change.positions is None else want[change.positions]
                assert (got.view(change.values.dtype) == change.values).all()
            made = DeviceMessage(room_, LABEL, transfers, LANES, places)
            assert not made.others()
            made.write()
        for number, (want, got) in enumerate(zip(now, target.content(), strict=True)):
            assert torch.equal(want, got), f"region {number} after {share}"
    return kinds


def said(kind: type[Exception], act: Any) -> str:
    """What the error says that `act` must raise."""
    try:
        act()
    except kind as error:
        return str(error)
    raise SystemExit(f"no {kind.__name__}")


def over() -> None:
    """What takes more than is left ends the search before its bodies are made."""
    words = torch.zeros(4096, dtype=torch.int16)
    snapshot = torch.zeros(8192, dtype=torch.uint8)
    found = DeviceChanges(CPU, 1 << 20, 1 << 20)
    found.add([0], [box_of(words)], [0])
    assert "8192 of 8200 bytes" in said(BindError, lambda: found.check({0: 8200})), "8 bytes that nobody compares"
    words += 1
    parts = list(found.find(snapshot, 8000, np.ones(1, np.int64)))
    assert [part.bodies for part in parts] == [None]
    assert parts[0].nbytes(np.asarray([3])) == 3 * (8192 + RECORD_BYTES)


def refused() -> None:
    """Malformed records with digests that fit are refused before anything is written."""
    live = torch.zeros(1000, dtype=torch.int16)
    places = DevicePlaces([box_of(live)])
    transfers = np.asarray([[1000, 2]], np.int64)

    def message(index: list[int], values: int, kind: Kind = Kind.TILES, span: int = 400, junk: int = -1, first: int = 0) -> Any:
        directory = np.asarray([(0, kind, 2, 0, first, span, values, len(index), 0)], RECORD)
        body = np.zeros(-(-len(index) // 8) * 8 + -(-2 * values // 8) * 8, np.uint8)
        body[: len(index)] = index
        body[-(-len(index) // 8) * 8 :][: 2 * values] = 7
        if junk >= 0:
            body[junk] = 9
        there = torch.from_numpy(body)
        front = head(LABEL, directory, len(body), LANES, digest_of_bytes(LANES, there))
        return torch.cat([torch.from_numpy(front), there])

    good = message([2, 1, 3, 200, 143], 3)
    cases = [
        (message([2, 1, 3, 3, 143], 3), "not in order"),
        (message([2, 1, 4, 3, 143], 3), "not in order"),
        (message([2, 1, 3, 200, 144], 3), "a tile that it does not have"),
        (message([2, 2, 3, 200, 143], 3), "tiles of 4 elements, not 3"),
        (message([0, 145, *range(145)], 145), "or of more than they have"),
        (message([0, 255, *range(143)], 143), "tiles of 144 elements, not 143"),
        (message([2, 1, 3, 200], 3), "4 bytes for 3 values"),
        (message([2, 1, 3, 200, 143, 0], 3), "6 bytes for 3 values"),
        (message([1, 1], 2, Kind.DENSE, 2), "2 bytes for 2 values"),
        (message([], 3, Kind.DENSE, 4), "0 bytes for 3 values"),
        (message([2, 1, 3, 200, 143], 3, junk=6), "bytes between the parts"),
        (message([2, 1, 3, 200, 143], 3, junk=15), "bytes between the parts"),
        (message([2, 1, 3, 200, 143], 3, first=700), "not in the plan"),
    ]
    damaged = good.clone()
    damaged[-5] ^= 1
    cases.append((damaged, "not those that were sent"))
    for raw, says in cases:
        assert says in said(DeltaError, lambda raw=raw: DeviceMessage(raw, LABEL, transfers, LANES, places)), says
    for other in (replace(LABEL, session="x"), replace(LABEL, target=3)):
        assert "not for here" in said(DeltaError, lambda to=other: DeviceMessage(good, to, transfers, LANES, places))
    assert not live.any()
    DeviceMessage(good, LABEL, transfers, LANES, places).write()
    assert live.nonzero().reshape(-1).tolist() == [3, 200, TILE + 143]
    dense = message([], 5, Kind.DENSE, 5, first=10)
    DeviceMessage(dense, LABEL, transfers, LANES, places).write()
    assert live.nonzero().reshape(-1).tolist() == [3, 10, 11, 12, 13, 14, 200, TILE + 143]
    assert Tables([box_of(live)], 2).word == 2


if __name__ == "__main__":
    case = sys.argv[1]
    if case == "refused":
        refused()
        over()
    else:
        kinds = {
            "device": lambda: round_trip(1, [0.02, 0.0, 0.6, 0.997], False, 1 << 20, 1 << 17),
            "host": lambda: round_trip(2, [0.05, 1.0], True, 1 << 15, 1 << 20),
            "chunks": lambda: round_trip(3, [0.3, 0.01], False, 1, 1 << 17),
            "filled": lambda: round_trip(4, [0.02, 0.9, 0.0], False, 1 << 20, 1 << 17, True),
        }[case]()
        print(sorted(kinds))
    print("equal")
