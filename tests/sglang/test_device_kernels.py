"""The Triton kernels, interpreted on the CPU: what they digest and copy is what numpy and torch say.

In a process of its own, for TRITON_INTERPRET must stand before triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import random
import numpy as np, torch
from weight_sync.device import kernels
from weight_sync.device.lanes import Lanes, finish
from weight_sync.device.tables import Tables, pair

random.seed(0)
torch.manual_seed(0)
memory = torch.randint(-(2**15), 2**15 - 1, (300000,), dtype=torch.int16)

def boxes(count):
    for _ in range(count):
        shape = [random.choice([1, 2, 3, 5]) for _ in range(random.choice([1, 2, 3]))] + [random.choice([4, 8, 64, 512])]
        strides, step = [0] * len(shape), 1
        for d in reversed(range(len(shape))):
            strides[d], step = step, step * shape[d] * random.choice([1, 1, 2])
        start = 4 * random.randrange(20)
        if step + start < len(memory):
            yield shape, strides, start

views = [memory.as_strided(*box) for box in boxes(10)]
# Of more words than a program takes: aligned to 16 bytes, beginning or ending between two such words, a single word.
views += [memory[start:end] for start, end in ((0, 80000), (8, 80012), (4, 80004), (16, 20))]
tables = Tables([(v.data_ptr(), 2, v.stride(), v.shape) for v in views], 8)
assert tables.plain[-4:].tolist() == [True, False, False, False]
sums = kernels.launch_digest(*tables.in_two("cpu", kernels.PER_PROGRAM)).numpy().view(np.uint64)
for i, view in enumerate(views):
    naive = Lanes()
    naive.update(view.contiguous().numpy().tobytes())
    total = sums[tables.owner == i].sum(dtype=np.uint64, keepdims=True)
    assert finish(total, np.asarray([2 * view.numel()], np.uint64)) == naive.intdigest(), i

# One region in pieces, plain ones and others, each of which says which word of the region it begins with.
whole, at = memory[4:240004], 0  # from between two words of 16 bytes: plain pieces begin with odd words of 8
pieces = []
while at < len(whole):
    size = min(4 * random.choice([1, 2, 3, 100, 8191, 8192, 8194]), len(whole) - at)
    pieces.append((at, size))
    at += size
firsts = np.asarray([at for at, _ in pieces], np.int64)
tables = Tables.of_ranges(whole.data_ptr() + 2 * firsts, 2 * np.asarray([n for _, n in pieces], np.int64), 8)
tables.table[:, 6] = firsts // 4
assert tables.plain.any() and not tables.plain.all()
sums = kernels.launch_digest(*tables.in_two("cpu", kernels.PER_PROGRAM)).numpy().view(np.uint64)
naive = Lanes()
naive.update(whole.numpy().tobytes())
assert finish(sums.sum(dtype=np.uint64, keepdims=True), np.asarray([2 * len(whole)], np.uint64)) == naive.intdigest()

out = torch.zeros(300000, dtype=torch.int16)
targets, at = [], 1
for view in views:
    targets.append(out[at : at + view.numel()].view(view.shape))
    at += view.numel() + 3
sources, there = pair(*([(v.data_ptr(), 2, v.stride(), v.shape) for v in side] for side in (views, targets)))
assert sources.word == 2
made, blocks = sources.on("cpu", kernels.PER_PROGRAM)
other, _ = there.on("cpu", kernels.PER_PROGRAM)
kernels.launch_copy(made, other, blocks, sources.word)
assert all(torch.equal(a, b) for a, b in zip(views, targets))
assert int((out != 0).sum()) == sum(int((v != 0).sum()) for v in views)

fence, missed = torch.tensor([7]), torch.zeros(1, dtype=torch.int64)
before = out.clone()
memory += 1
kernels.launch_copy(made, other, blocks, sources.word, (fence.data_ptr(), 8, missed))
assert torch.equal(out, before) and int(missed) == len(blocks[0])
kernels.launch_copy(made, other, blocks, sources.word, (fence.data_ptr(), 7, missed))
assert all(torch.equal(a, b) for a, b in zip(views, targets)) and int(missed) == len(blocks[0])
print("equal", len(views))
"""


def test_digests_and_strided_copies_of_the_kernels_equal_numpy_and_a_closed_fence_copies_nothing() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("equal ")
