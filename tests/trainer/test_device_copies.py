"""Copies of torch tensors' bytes and what differs from them, as on a GPU but in host memory, in pieces of 256 bytes.

What only a GPU does, doing things later than they are asked for, is played by a double (Late).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.errors import VerifyError
from weight_sync.session import copies, snapshot
from weight_sync.session.copies import Differing, differing, duplicates
from weight_sync.session.device_memory import DeviceMemory
from weight_sync.session.snapshot import Snapshot, scramble
from weight_sync_integrations import loader
from weight_sync_integrations.loader import Held

PIECE = 256
SIZES = [0, 1, 127, 128, 129, 255, 256, 257, 512, 700, 3 * 256, 2000]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE", PIECE)
    monkeypatch.setattr(copies, "_SHARE", 64)
    monkeypatch.setattr(copies, "THREADS", 3)


def tensors(seed: int = 0) -> list[torch.Tensor]:
    """Of all sizes, at odd addresses."""
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size + 1,), dtype=torch.uint8, generator=noise)[1:] for size in SIZES]


class Late(TorchDispatchMode):
    """A stream: what is asked of torch is noted, and done when somebody waits for it or fetches a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], Any]] = []
        self._asked = self.fetched = 0
        self._working = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits for a single number"
        if self._working or func.is_view or func.namespace != "aten" or "empty" in func.name():
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._ask(lambda: func(*args, **kwargs))
            return args[0]
        out = func(*args, **kwargs)
        self._ask(lambda: out.copy_(func(*args, **kwargs)))
        return out

    def _ask(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)
        self._asked += 1

    def finish(self, asked: int) -> None:
        self._working = True
        while self._asked - len(self._queue) < asked:
            self._queue.pop(0)()
        self._working = False

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.finish(self._asked)
        self.fetched += 1
        self._working = True
        copy = tensor.clone()
        self._working = False
        return copy

    def event(self, device: Any) -> Any:
        gpu = self

        class Event:
            asked = 0

            def record(self, stream: Any) -> None:
                self.asked = gpu._asked

            def synchronize(self) -> None:
                gpu.finish(self.asked)

        return Event()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    gpu = Late()
    monkeypatch.setattr(copies, "_event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: gpu.fetch(tensor))
    return gpu


def sparse(seed: int) -> tuple[list[Any], list[torch.Tensor], list[Differing]]:
    """Copies, live tensors with some other bytes, and what numpy says of them."""
    live = tensors(seed)
    made = [tensor.numpy().copy() for tensor in live]
    noise = np.random.default_rng(seed)
    want = []
    for tensor in live:
        at = np.flatnonzero(noise.random(len(tensor)) < 0.01)
        tensor.numpy()[at] ^= noise.integers(1, 256, len(at), np.uint8)
        want.append(Differing(len(at), int(at[0])) if len(at) else Differing())
    return made, live, want


def test_a_copy_is_equal_and_shares_no_memory() -> None:
    live = tensors()
    made = duplicates(live)
    assert [len(copy) for copy in made] == SIZES
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(live, made, strict=True))
    assert differing(made, live) == [Differing()] * len(SIZES)
    for tensor in live:
        tensor.bitwise_not_()
    assert differing(made, live) == [Differing(size, 0) if size else Differing() for size in SIZES]


def test_one_byte_is_found_wherever_it_is_also_in_a_last_piece_that_is_not_whole() -> None:
    base = tensors()[SIZES.index(700)]
    live = [base.clone() for _ in base]
    for i, tensor in enumerate(live):
        tensor[i] ^= 1 << i % 8
    assert differing([base.numpy()] * len(live), live) == [Differing(1, i) for i in range(700)]


@pytest.mark.parametrize("seed", range(5))
def test_bytes_in_several_pieces_are_counted_exactly_and_the_first_is_the_first(seed: int) -> None:
    made, live, want = sparse(seed)
    assert differing(made, live) == want
    assert sum(found.count for found in want) > 20


def test_numbers_that_compare_as_they_are_not_are_compared_by_their_bytes() -> None:
    numbers = torch.tensor([float("nan"), 0.0, 1.0])
    made = duplicates([numbers.view(torch.uint8)])
    assert differing(made, [numbers.view(torch.uint8)]) == [Differing()]
    assert differing(made, [torch.tensor([float("nan"), -0.0, 1.0]).view(torch.uint8)]) == [Differing(1, 7)]


def test_tensors_and_arrays_may_come_in_one_row() -> None:
    made, live, want = sparse(7)
    mixed = [tensor if i % 2 else tensor.numpy() for i, tensor in enumerate(live)]
    assert differing(made, mixed) == want
    assert differing(duplicates(mixed), live) == [Differing()] * len(SIZES)


def test_a_copy_of_another_length_is_never_called_equal() -> None:
    for wrong in (torch.zeros(1, dtype=torch.uint8), torch.zeros(99, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=f"{len(wrong)} bytes to be compared with a copy of 100"):
            differing([np.zeros(100, np.uint8)], [wrong])


def test_what_is_made_for_a_comparison_is_dropped_as_it_goes() -> None:
    alive: set[int] = set()

    def made() -> Iterator[torch.Tensor]:
        for i in range(20):
            tensor = torch.full((600,), i, dtype=torch.uint8)
            alive.add(i)
            weakref.finalize(tensor, alive.discard, i)
            yield tensor
            del tensor
            assert not alive

    kept = duplicates(made())
    assert differing(kept, made()) == [Differing()] * 20
    assert [int(copy[0]) for copy in kept] == list(range(20))


# -- a device that is late ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_however_late_the_device_is_bytes_are_copied_and_compared_as_they_are(late: Late, seed: int) -> None:
    made, live, want = sparse(seed)
    with late:
        found, copied = differing(made, live), duplicates(live)
    assert found == want
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(live, copied, strict=True))


def test_who_does_not_wait_for_the_device_is_found_out_by_this_double(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies._Pinned, "settle", lambda self: None)
    made, live, want = sparse(0)
    with late:
        found, copied = differing(made, live), duplicates(live)
    assert found != want
    assert not all(np.array_equal(a.numpy(), b) for a, b in zip(live, copied, strict=True))


def test_thousands_of_small_tensors_are_fetched_together(late: Late) -> None:
    live = [torch.full((3,), i % 256, dtype=torch.uint8) for i in range(2000)]
    made = [np.full(3, i % 256, np.uint8) for i in range(2000)]
    made[1234][2] ^= 1
    with late:
        found = differing(made, live)
    assert [(i, one) for i, one in enumerate(found) if one.count] == [(1234, Differing(1, 2))]
    assert late.fetched == 1


# -- snapshots of a device's memory ------------------------------------------------------------------------------------


def worker() -> tuple[dict[str, torch.Tensor], DeviceMemory, dict[str, Any]]:
    """Parameters of 1,000, 514 and no bytes, and 30 rows of padding that no transfer writes."""
    live = {
        "a": torch.randn(10, 25).float(),
        "b": torch.randn(257).bfloat16(),
        "none": torch.empty(0, 4),
        "padding": torch.zeros(30, 3),
    }
    table = {
        "tensors": ["A", "B"],
        "params": ["a", "b"],
        "start": [0, 0],
        "strides": [[25, 1], [1]],
        "shape": [[10, 25], [257]],
    }
    return live, DeviceMemory(live, "rollout rank 0"), table


def test_snapshot_scramble_and_compare_on_a_device_pass_only_for_the_same_bytes() -> None:
    live, memory, table = worker()
    before = {name: tensor.clone() for name, tensor in live.items()}
    taken = Snapshot(memory)
    assert scramble(memory, table, taken) == 1000 + 514
    with pytest.raises(
        VerifyError, match=r"2 of 4 .* a \(A\): 1000 of 1000 bytes differ, first byte 0: .* b \(B\): 514 of 514"
    ):
        taken.compare(table)
    for name, tensor in live.items():
        tensor.copy_(before[name])
    assert taken.compare(table) == taken.nbytes == 1000 + 514 + 360
    raw = live["padding"].view(-1).view(torch.uint8)
    raw[359] = 0x80
    raw[300] = 1
    text = r"1 of 4 .* padding \(no transfer writes there\): 2 of 360 bytes differ, first byte 300: was 0x00, is 0x01"
    with pytest.raises(VerifyError, match=text):
        taken.compare(table)


@pytest.mark.parametrize(("name", "byte"), [("a", 999), ("b", 0), ("padding", 200)])
def test_a_parameter_that_changed_while_it_was_copied_is_seen_by_the_second_look(
    name: str, byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, memory, _ = worker()

    def change(raws: Any) -> Any:
        made = duplicates(raws)
        live[name].view(-1).view(torch.uint8)[byte] ^= 1
        return made

    monkeypatch.setattr(snapshot, "duplicates", change)
    with pytest.raises(VerifyError, match=f"rollout rank 0: {name} changed while it was copied: the engine is not quiet"):
        Snapshot(memory)


def test_a_byte_that_is_not_inverted_or_that_no_transfer_writes_fails_the_scrambling() -> None:
    live, memory, table = worker()
    taken = Snapshot(memory)
    live["padding"][29, 2] = 1.0
    with pytest.raises(VerifyError, match="the plan covers 1514 bytes, 1516 differ after they were all inverted"):
        scramble(memory, table, taken)


# -- what an engine's own loader must bring back -------------------------------------------------------------------------


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        monkeypatch.setattr(loader, "_raw", loader._bytes)


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(20, 33).bfloat16(),
        "columns": torch.randn(33, 40).t(),
        "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
        "slice": torch.randn(40, 20)[:, :7],
        "nan": torch.full((70,), float("nan")),
        "scale": torch.tensor(0.5),
        "one row": torch.randn(1, 300).t(),
        "flags": torch.rand(300) < 0.5,
        "fp8": torch.randn(16, 16).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4).t(),
    }


@pytest.mark.usefixtures("where")
def test_what_a_load_brought_back_passes_and_any_other_byte_is_counted_by_name() -> None:
    live = model()
    held = Held.of(live, "rollout rank 0")
    assert held.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in live.values())
    held.compare(live)
    held.compare({name: tensor.clone() for name, tensor in live.items()})
    for name, tensor in live.items():
        if tensor.numel():
            # Through the elements, so that this knows nothing of where they lie.
            last = tensor[tuple(size - 1 for size in tensor.shape)]
            kept = last.clone()
            last.copy_(~kept if kept.dtype == torch.bool else torch.tensor(3.0))
            with pytest.raises(VerifyError, match=rf"1 of 10 tensors .*: {name}: [1-4] of \d+ bytes differ$"):
                held.compare(live)
            last.copy_(kept)
    held.compare(live)


@pytest.mark.usefixtures("where")
def test_every_byte_of_a_load_is_scrambled_and_one_that_is_not_is_named() -> None:
    live = model()
    del live["slice"]
    held = Held.of(live, "rollout rank 0")
    emptied = {"packed away": torch.empty(0)}  # no part of what was copied, and nothing to scramble
    assert held.scramble(live | emptied) == held.nbytes
    with pytest.raises(VerifyError, match="8 of 9 tensors"):
        held.compare(live)
    held = Held.of({"w": torch.zeros(4)}, "rollout rank 0")
    for other, text in (
        ({"w": torch.zeros(5)}, r"w: was torch.float32 \[4\], is torch.float32 \[5\]"),
        ({"v": torch.zeros(4)}, "v: is new"),
    ):
        with pytest.raises(VerifyError, match=f"rollout rank 0: 1 tensors are not as they were when they were copied: {text}"):
            held.scramble(other)
        assert not any(bool(tensor.any()) for tensor in other.values())
    gaps = {"slice": torch.randn(40, 20)[:, :7]}
    with pytest.raises(VerifyError, match="slice has bytes that are as they were after all were inverted"):
        Held.of(gaps, "rollout rank 0").scramble(gaps)
    same = {"w": torch.randint(0, 256, (700,), dtype=torch.uint8)}
    held = Held.of(same, "rollout rank 0")
    held.copies["w"].raw[699] ^= 0xFF
    with pytest.raises(VerifyError, match="w has bytes that are as they were"):
        held.scramble(same)


@pytest.mark.usefixtures("where")
def test_strides_that_no_element_depends_on_may_be_others() -> None:
    live = {"one row": torch.randn(1, 300).t(), "none": torch.empty(0, 4).t(), "slice": torch.randn(40, 20)[:, :7]}
    held = Held.of(live, "rollout rank 0")
    other = {name: tensor.contiguous().view(tensor.shape) for name, tensor in live.items()}
    other["none"] = torch.empty(4, 0).as_strided((4, 0), (9, 1))
    other["one row"] = other["one row"].as_strided((300, 1), (1, 1))
    held.compare(other)


@pytest.mark.usefixtures("where")
def test_a_tensor_whose_bytes_are_the_same_but_whose_elements_are_others_is_refused() -> None:
    square = torch.randn(16, 16)
    held = Held.of({"w": square, "v": square}, "rollout rank 0")
    with pytest.raises(VerifyError, match=r"1 of 2 .* w: its dims, .* were \[0, 1\], are \[1, 0\]"):
        held.compare({"w": square.t(), "v": square})
    for other, text in (
        (square.half(), r"w: was torch.float32 \[16, 16\], is torch.float16 \[16, 16\]"),
        (square.view(8, 32), r"w: was torch.float32 \[16, 16\], is torch.float32 \[8, 32\]"),
    ):
        with pytest.raises(VerifyError, match=text):
            held.compare({"w": other, "v": square})
    with pytest.raises(VerifyError, match=r"2 of 2 tensors .* v is gone.* x is new"):
        held.compare({"w": square, "x": square})
