"""Snapshot, scramble and compare of live parameters on a GPU, through pinned memory. Needs CUDA: run by hand, not in CI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/gpu needs torch with CUDA")
if not torch.cuda.is_available():
    pytest.skip("tests/gpu needs a CUDA device", allow_module_level=True)

from weight_sync.errors import VerifyError  # noqa: E402
from weight_sync.session import snapshot  # noqa: E402
from weight_sync.session.copies import PIECE, Differing, differing, duplicates  # noqa: E402
from weight_sync.session.memory import memory_of  # noqa: E402
from weight_sync.session.snapshot import Snapshot, scramble  # noqa: E402


def noise(nbytes: int) -> Any:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


def test_snapshot_scramble_and_compare_see_every_byte_of_parameters_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of several pieces and a rest, of exactly two, thousands of a few bytes, none; the last one is written by no transfer.
    sizes = [3 * PIECE + 258, 2 * PIECE, *[6] * 3000, 0, 1000]
    live = {f"w{i}": noise(size).view(torch.bfloat16) for i, size in enumerate(sizes)}
    names, padding = list(live)[:-2], list(live)[-1]
    shapes = [list(live[name].shape) for name in names]
    table = {"tensors": names, "params": names, "start": [0] * len(names), "strides": [[1]] * len(names), "shape": shapes}
    before = {name: tensor.clone() for name, tensor in live.items()}
    memory = memory_of(live, "rollout rank 0")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()

    taken = Snapshot(memory)
    assert all(np.array_equal(taken._copies[name], t.view(torch.uint8).cpu().numpy()) for name, t in live.items())
    assert scramble(memory, table, taken) == sum(sizes) - 1000
    with pytest.raises(VerifyError, match=rf"{len(names)} of {len(sizes)} .* w0 \(w0\): {sizes[0]} of {sizes[0]} bytes differ"):
        taken.compare(table)
    for name in names:
        live[name].copy_(before[name])
    assert taken.compare(table) == sum(sizes)
    assert torch.cuda.max_memory_allocated() - held < 2 * PIECE
    assert torch.cuda.memory_allocated() == held

    raw = live["w0"].view(torch.uint8)
    raw[[PIECE - 1, PIECE, sizes[0] - 1]] ^= 0x80
    live[padding].view(torch.uint8)[999] ^= 1
    text = rf"2 of {len(sizes)} .* w0 \(w0\): 3 of {sizes[0]} bytes differ, first byte {PIECE - 1}: .*: 1 of 1000 .* byte 999:"
    with pytest.raises(VerifyError, match=text):
        taken.compare(table)

    def change(raws: Any) -> Any:
        made = duplicates(raws)
        raw[sizes[0] - 1] ^= 1
        return made

    monkeypatch.setattr(snapshot, "duplicates", change)
    with pytest.raises(VerifyError, match="w0 changed while it was copied"):
        Snapshot(memory)


def test_bytes_on_a_gpu_and_on_the_host_are_compared_in_one_row_and_beside_other_work_of_the_gpu() -> None:
    live = [noise(2 * PIECE + 1) if i % 2 else noise(3000).cpu().numpy() for i in range(6)]
    torch.cuda._sleep(200_000_000)  # what is asked for now is done a tenth of a second later
    made = duplicates(live)
    assert differing(made, live) == [Differing()] * 6
    made[3][2 * PIECE] ^= 1
    made[4][7] ^= 1
    torch.cuda._sleep(200_000_000)
    assert differing(made, live) == [Differing()] * 3 + [Differing(1, 2 * PIECE), Differing(1, 7), Differing()]


def test_what_an_engines_own_loader_brings_back_is_compared_whatever_its_strides() -> None:
    held = pytest.importorskip("weight_sync_integrations.loader").Held
    rows = PIECE // 1000
    live = {
        "columns": torch.randn(rows, 600, device="cuda").t(),
        "slice": torch.randn(rows, 600, device="cuda")[:, :500],
        "nan": torch.full((999,), float("nan"), device="cuda"),
        "fp8": torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4, device="cuda"),
        "host": torch.randn(99),
    }
    kept = held.of(live, "rollout rank 0")
    kept.compare(live)
    live["columns"][599, rows - 1] = 3.0
    live["slice"][rows - 1, 499] = 3.0
    with pytest.raises(VerifyError, match=r"2 of 6 tensors .* columns: \d of .* slice: \d of"):
        kept.compare(live)
    del live["slice"]
    assert held.of(live, "rollout rank 0").scramble(live) == sum(t.nbytes for t in live.values())
