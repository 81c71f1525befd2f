"""Run by test_delta_kernels.py with TRITON_INTERPRET=1: changes found, encoded, laid down, checked and written by the kernels.

Everything is compared with numpy, and what the kernels encode is decoded by the host's decoder as well.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weight_sync.delta.codec import ALL, TILE, WORDS, Kind, Record, decode, encode, message_bytes, write_message
from weight_sync.delta.message import (
    HEADER_BYTES,
    LANES,
    RECORD,
    RECORD_BYTES,
    Label,
    body_bytes,
    directory_end,
    head,
    records_in,
)
from weight_sync.delta.spec import Base
from weight_sync.device import changes as kernels_of_changes
from weight_sync.device import tables
from weight_sync.device.changes import GROUP, count_kernel, tiles_of
from weight_sync.device.lanes import Lanes
from weight_sync.device.tables import Tables
from weight_sync.errors import BindError, DeltaError
from weight_sync.session.delta_device import DeviceChanges
from weight_sync.session.delta_encoded import Encoded, Message
from weight_sync.session.delta_target import _scatter  # noqa: F401 - imported as the worker does
from weight_sync.session.delta_told import DeviceMessage, DevicePlaces
from weight_sync.session.digests import box_of, digest_of_bytes

LABEL = Label("3-ab-cd", Base("3-ab-ef", 7, "0123456789abcdef" * 2), "plan", 2, 1 << 40)
LEAST = HEADER_BYTES + RECORD_BYTES + (1 << 16)
"""Bytes of a message that takes all that one program compares."""
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

    def beside(self) -> list[Any]:
        """The words that are of no region."""
        found = []
        for words, view in zip(self.kept, self.views, strict=True):
            free = torch.ones(len(words), dtype=torch.bool)
            free.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            found.append(words[free].clone())
        return found

    def content(self) -> list[Any]:
        return [view.contiguous().view(-1).clone() for view in self.views]


TILEWISE = -1.0
"""A share: nothing of most tiles, all or nearly all of some."""


def nudge(view: Any, share: float, rng: Any) -> None:
    flat = view.contiguous().view(-1)
    hit = torch.from_numpy(rng.random(flat.numel()) < share)
    if share == TILEWISE:
        for low in range(0, flat.numel(), TILE):
            here = hit[low : low + TILE]
            here[torch.from_numpy(rng.permutation(len(here))[: rng.choice([0] * 20 + [1, 254, 255, 256])])] = True
    bits = np.uint64(1) << rng.integers(0, 8 * view.element_size(), flat.numel()).astype(np.uint64)
    flat[hit] ^= torch.from_numpy(bits.view(np.int64)).to(flat.dtype)[hit]
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
        assert used <= message, "any record fits a message"
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


class Specialised:
    """A kernel all of whose launches must be given pointers to multiples of 16 bytes."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            for place, argument in enumerate(arguments):
                # Where an allocation begins is a multiple of 512 on a GPU.
                at = argument.storage_offset() * argument.element_size() if isinstance(argument, torch.Tensor) else 0
                assert at % 16 == 0, f"{self.name}: argument {place} is compiled for other addresses"
            self.kernel[grid](*arguments, **constants)

        return launch


def alignment_is_looked_at() -> None:
    """What is said to be plain is asked for 16 bytes at a time, of both sides; that it may not be, only a GPU says."""
    launch = kernels_of_changes.launch_compare

    def looked_at(table: Any, of_both: Any, known: Any, known_base: int, *rest: Any) -> None:
        rows = of_both[0][0].long().unique()
        for column in (table[rows, 0], known_base + known[rows], table[rows, 5] * 8):
            assert not (column % 16).any(), "a GPU would stop here"
        launch(table, of_both, known, known_base, *rest)

    kernels_of_changes.launch_compare = looked_at
    # Which program runs follows from this too: none may be compiled in a sync because it has another number of records.
    for name in ("compare_kernel", "count_kernel", "emit_kernel", "tally_kernel", "put_kernel"):
        setattr(kernels_of_changes, name, Specialised(name, getattr(kernels_of_changes, name)))


def round_trip(seed: int, shares: list[float], on_host: bool, chunk: int, message: int, filled: bool = False) -> set[int]:
    rng = np.random.default_rng(seed)
    shapes = [
        (2, (33000,)), (2, (3, 5, 64, 40)), (1, (8, 2048)), (4, (5002,)), (8, (1200,)), (2, (256,)), (2, (4,)), (1, (8,)),
        (2, (2, 3, 2, 8, 64)), (4, (2, 255 * 8)), (2, (3,)),
    ]  # fmt: skip
    source, target = Side(shapes, rng, True), Side(shapes, rng, True)
    for a, b in zip(source.views, target.views, strict=True):
        b.copy_(a)
    beside = target.beside()
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

    def snapshot_is(content: list[Any]) -> None:
        raw = snapshot if on_host else snapshot.numpy()
        for number in found.numbers:
            held = raw[start[number] : start[number] + nbytes[number]]
            assert (held == content[number].numpy().view(np.uint8)).all(), f"the snapshot of region {number}"

    found.store(snapshot)
    snapshot_is(source.content())
    places = DevicePlaces([box_of(v) for v in target.views], CPU)
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
        snapshot_is(now)
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
            room_.fill_(0xEE)  # what was checked is what is written, whatever arrives in the buffer
            assert not made.others()
            made.write()
        for number, (want, got) in enumerate(zip(now, target.content(), strict=True)):
            assert torch.equal(want, got), f"region {number} after {share}"
    assert all(torch.equal(a, b) for a, b in zip(beside, target.beside(), strict=True)), "written beside a region"
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
    smaller = DeviceChanges(CPU, LEAST - 1, 1 << 20)
    smaller.add([0], [box_of(words)], [0])
    assert (found.numbers, smaller.numbers) == ({0}, set()), "no record would fit"
    assert "8192 of 8200 bytes" in said(BindError, lambda: found.check({0: 8200})), "8 bytes that nobody compares"
    words += 1
    parts = list(found.find(snapshot, 8000, np.ones(1, np.int64)))
    assert [part.bodies for part in parts] == [None]
    assert parts[0].nbytes(np.asarray([3])) == 3 * (8192 + RECORD_BYTES)
    # Each region is a part here. What the first takes, as often as it is sent, is not there for the second.
    record = 4096 + RECORD_BYTES
    for copies, left, parts_made in (([1, 1], 2 * record, 2), ([1, 1], 2 * record - 1, 1), ([2, 1], 2 * record, 1)):
        halves = DeviceChanges(CPU, 1 << 20, 1)
        halves.add([0, 1], [box_of(words[:2048]), box_of(words[2048:])], [0, 4096])
        made = list(halves.find(torch.zeros(8192, dtype=torch.uint8), left, np.asarray(copies)))
        assert [part.bodies is not None for part in made] == [True] * parts_made + [False] * (2 - parts_made)
        assert [part.elements for part in made] == [2048, 2048]


def to_some() -> None:
    """A rank that gets some of the regions, one of them twice, gets their records."""
    words = torch.arange(4 * 64, dtype=torch.int16)
    found, encoded = DeviceChanges(CPU, 1 << 20, 1 << 20), Encoded(1 << 20)
    found.add([0, 1, 2, 3], [box_of(part) for part in words.split(64)], [0, 128, 256, 384])
    for part in found.find(torch.zeros(512, dtype=torch.uint8), 1 << 20, np.ones(4, np.int64)):
        encoded.add_found(part)
    records = np.asarray([0, 2, 2, 3])
    used = HEADER_BYTES + 4 * (RECORD_BYTES + 128)
    room = torch.full((used,), 0xEE, dtype=torch.uint8)
    encoded.lay_down(room, Message(0, records, np.arange(4), used), LABEL, LANES)
    told = decode(room.numpy(), LABEL, [(64, 2)] * 4, LANES)
    assert [change.transfer for change in told] == [0, 1, 2, 3]
    for change, region in zip(told, records.tolist(), strict=True):
        assert (change.values == np.arange(64 * region, 64 * region + 64)).all()


def cut_anywhere() -> None:
    """A snapshot in host memory is compared in parts. One of them begins between two multiples of 16 bytes here, with a region
    in it that is plain. A region of no elements is nobody's."""
    words = torch.arange(464, dtype=torch.int16)
    views = [words[:120], words[120:].as_strided((3, 3, 3, 4), (88, 28, 8, 1), 120), words[400:], words[:0]]
    start = [0, 256, 512, 640]
    snapshot = np.zeros(640, np.uint8)
    found = DeviceChanges(CPU, 1 << 20, 350)
    found.add([0, 1, 2, 3], [box_of(view) for view in views], start)
    assert found._parts[1].known_at[0] % 16 == 8
    assert found.numbers == {0, 1, 2}
    found.store(snapshot)
    words += 1
    assert all(part.bodies is not None for part in found.find(snapshot, 1 << 20, np.ones(4, np.int64)))
    for view, at in zip(views, start, strict=True):
        assert (snapshot[at : at + 2 * view.numel()].view(np.int16) == view.numpy().reshape(-1)).all()
    assert found.digests()[0].tolist() == [0, 1, 2]


def refused() -> None:
    """Malformed records with digests that fit are refused before anything is written."""
    live = torch.zeros(1000, dtype=torch.int16)
    places = DevicePlaces([box_of(live)], CPU)
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
        (message([6, 0, 1, 2, 3, 4, 4, 5], 6), "not in order"),  # the first that a thread asks for after AHEAD others
        (message([2, 1, 3, 200, 144], 3), "a tile that it does not have"),
        (message([2, 2, 3, 200, 143], 3), "tiles of 4 elements, not 3"),
        (message([0, 145, *range(145)], 145), "or of more than they have"),
        (message([0, 255, *range(143)], 143), "tiles of 144 elements, not 143"),
        (message([2, 1, 3, 200], 3), "4 bytes for 3 values"),
        (message([2, 1, 3, 200, 143, 0], 3), "6 bytes for 3 values"),
        (message([1, 1], 2, Kind.DENSE, 2), "2 bytes for 2 values"),
        (message([], 3, Kind.DENSE, 4), "0 bytes for 3 values"),
        (message([2, 1, 3, 200, 143], 3, junk=6), "record 0: bytes between its parts"),
        (message([2, 1, 3, 200, 143], 3, junk=15), "record 0: bytes between its parts"),
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


def tiles(first: int, size: int, index: list[int], values: int) -> Record:
    """Of 400 elements, whose values are 1, 2, .."""
    new = np.arange(1, values + 1).astype(WORDS[size])
    return Record(Kind.TILES, size, first, 400, values, np.asarray(index, np.uint8), new.view(np.uint8))


def written(records: list[tuple[int, Record]]) -> Any:
    raw = np.zeros(message_bytes(record for _, record in records), np.uint8)
    assert write_message(raw, LABEL, records, LANES) == len(raw)
    return torch.from_numpy(raw)


def mixed() -> None:
    """Records of two sizes, of the host's kinds, and of a region that no launch can take, in one message.

    Errors name the record by its place in the message.
    """
    live = [torch.zeros(1000, dtype=torch.int16), torch.zeros(600, dtype=torch.int32), torch.zeros(800, dtype=torch.int16)]
    most, tables._MOST_WORDS = tables._MOST_WORDS, 900
    places = DevicePlaces([box_of(words) for words in live], CPU)
    tables._MOST_WORDS = most
    assert (places.row >= 0).tolist() == [False, True, True]
    transfers = np.asarray([[len(words), words.element_size()] for words in live], np.int64)
    of_host = encode(450, np.arange(100, 200, dtype=np.uint32), np.asarray([7, 9]))
    assert of_host.kind == Kind.GAPS8
    good = [
        (0, tiles(300, 2, [1, 1, 7, 143], 2)),
        (1, tiles(0, 4, [2, 0, 0, 255], 2)),
        (1, of_host),
        (2, tiles(400, 2, [0, 3, 1, 2, 143], 3)),
    ]
    found = DeviceMessage(written(good), LABEL, transfers, LANES, places)
    assert [(c.transfer, c.positions.tolist(), c.values.tolist()) for c in found.others() if c.positions is not None] == [
        (0, [307, 300 + 256 + 143], [1, 2]), (1, [457, 459], [107, 109]),
    ]  # fmt: skip
    assert not any(words.any() for words in live)
    found.write()
    assert [words.nonzero().reshape(-1).tolist() for words in live] == [[], [0, 255], [400 + 256 + n for n in (1, 2, 143)]]
    raw = written(good).clone()
    end = directory_end(len(good))
    directory, body = raw[HEADER_BYTES:end].numpy().view(RECORD), raw[end:]
    body[int(body_bytes(directory)[:3].sum()) + int(directory["index"][3])] = 9
    raw[:end] = torch.from_numpy(head(LABEL, directory, len(body), LANES, digest_of_bytes(LANES, body)))
    text = said(DeltaError, lambda: DeviceMessage(raw, LABEL, transfers, LANES, places))
    assert "record 3: bytes between its parts" in text, text
    wrong = [
        (0, tiles(300, 2, [1, 1, 7, 144], 2), "record 0: elements of a tile"),
        (1, tiles(0, 4, [2, 1, 0, 255], 2), "record 1: tiles of 3 elements, not 2"),
        (1, tiles(0, 4, [2, 0, 255, 255], 2), "record 1: elements of a tile"),
        (1, tiles(0, 4, [2, 0, 0], 2), "record 1: 3 bytes for 2 values of 400 elements"),
        (2, replace(of_host, index=np.asarray([7, 200], np.uint8)), "record 2: gaps lead to element"),
        (3, tiles(400, 2, [0, 3, 1, 2, 144], 3), "record 3: elements of a tile"),
        (3, tiles(400, 2, [0, 145, *range(145)], 145), "record 3: tiles of 145 elements"),
    ]
    for number, record, says in wrong:
        raw = written([*good[:number], (good[number][0], record), *good[number + 1 :]])
        at_once = said(DeltaError, lambda raw=raw: DeviceMessage(raw, LABEL, transfers, LANES, places).others())
        assert says in at_once, (says, at_once)


def counted() -> None:
    """Units that do not fill the last program: nothing is written behind what they are counted in."""
    for size in (1, 2, 4, 8):
        each, units = tiles_of(size, TILE), 5
        together = max(1, GROUP // each)
        rng = np.random.default_rng(size)
        flags = rng.integers(0, 256, (units + together) * each * TILE // 8, np.uint8)  # what is behind them must not count
        elements = units * each * TILE - 100
        flags[elements // 8 : units * each * TILE // 8] = 0
        flags[elements // 8] = (1 << elements % 8) - 1
        held = torch.full(((units + together) * each,), 0xEE, dtype=torch.uint8)
        count = torch.full((units + together,), -7, dtype=torch.int32)
        record = torch.zeros(units, dtype=torch.int32)
        zero, span = torch.zeros(1, dtype=torch.int64), torch.full((1,), elements)
        count_kernel[(-(-units // together),)](
            torch.from_numpy(flags), record, zero, span, held, count, units, TILE=TILE, ALL=ALL, TILES=each, TOGETHER=together
        )
        bits = np.unpackbits(flags, bitorder="little").reshape(-1, TILE).sum(1)[: units * each]
        assert (held.numpy()[: units * each] == bits).all()
        assert (held[units * each :] == 0xEE).all()
        assert (count.numpy()[:units] == bits.reshape(units, each).sum(1)).all()
        assert (count[units:] == -7).all()


if __name__ == "__main__":
    alignment_is_looked_at()
    case = sys.argv[1]
    if case == "refused":
        for each in (refused, over, mixed, counted, to_some, cut_anywhere):
            each()
    else:
        kinds = {
            "device": lambda: round_trip(1, [0.02, 0.0, TILEWISE, 0.6, 0.997], False, 1 << 20, LEAST),
            "host": lambda: round_trip(2, [TILEWISE, 1.0], True, 1 << 15, 1 << 20),
            "chunks": lambda: round_trip(3, [0.3, 0.01], False, 1, 1 << 17),
            "filled": lambda: round_trip(4, [0.02, 0.9, 0.0], False, 1 << 20, 1 << 17, True),
        }[case]()
        print(sorted(kinds))
    print("equal")
