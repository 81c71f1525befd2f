"""A 64-bit digest that thousands of GPU threads can compute at once: `lanes`, beside xxh3 for host memory.

xxh3 reads its input in order; a GPU would leave all but one of its lanes idle. Here every 8-byte word is hashed with its
position, and the hashes are added, so the order of the work does not matter and any byte or position that differs changes the
sum. Not a cryptographic digest: it finds faults, not forgeries, as xxh3 does.

    w_0 .. w_(n-1)  the region's bytes in row-major order as little-endian 64-bit words, the last one filled up with zeros
    h_i             mix(w_i + (i + 1) * GOLDEN)
    digest          mix(h_0 + .. + h_(n-1) + nbytes * ODD)          all arithmetic modulo 2^64

`mix` is the 64-bit finaliser of MurmurHash3 (Austin Appleby, public domain): a bijection in which every input bit changes about
half of the output bits. GOLDEN is 2^64 divided by the golden ratio, as in splitmix64.

Both sides of a transfer must use the same digest: the controller chooses one for a plan (weight_sync.session.connect).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
ODD = 0xD6E8FEB86659FD93
MIX_1 = 0xFF51AFD7ED558CCD
MIX_2 = 0xC4CEB9FE1A85EC53

Words = NDArray[np.uint64]
_CHUNK = 1 << 17
"""Words worked on at a time on the host, so that the passes below stay in the cache."""


def mix(x: Words) -> Words:
    """MurmurHash3's fmix64 on each word."""
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(MIX_1)
    x ^= x >> np.uint64(33)
    x *= np.uint64(MIX_2)
    x ^= x >> np.uint64(33)
    return x


def finish(total: Words, nbytes: Words) -> Words:
    """Digests from sums of the h_i and bytes, of any number of regions."""
    return mix(total + nbytes * np.uint64(ODD))


class Lanes:
    """Same use as a hashlib object: update(bytes), intdigest(), hexdigest()."""

    def __init__(self) -> None:
        self._total = 0
        self._words = 0
        self._nbytes = 0
        self._tail = b""

    def update(self, data: Any) -> None:
        raw = np.frombuffer(data, np.uint8)
        self._nbytes += len(raw)
        if self._tail:
            take = min(8 - len(self._tail), len(raw))
            self._tail += raw[:take].tobytes()
            raw = raw[take:]
            if len(self._tail) < 8:
                return
            self._add(np.frombuffer(self._tail, "<u8"))
            self._tail = b""
        whole = len(raw) // 8 * 8
        # A copy only where the bytes start between two words.
        words = raw[:whole].view("<u8") if raw.ctypes.data % 8 == 0 else np.frombuffer(raw[:whole].tobytes(), "<u8")
        for low in range(0, len(words), _CHUNK):
            self._add(words[low : low + _CHUNK])
        self._tail = raw[whole:].tobytes()

    def _add(self, words: Words) -> None:
        position = np.arange(self._words + 1, self._words + 1 + len(words), dtype=np.uint64)
        self._total = (self._total + int(mix(words + position * np.uint64(GOLDEN)).sum(dtype=np.uint64))) & (2**64 - 1)
        self._words += len(words)

    def intdigest(self) -> int:
        total = self._total
        if self._tail:
            rest = Lanes()
            rest._words = self._words
            rest._add(np.frombuffer(self._tail.ljust(8, b"\0"), "<u8"))
            total = (total + rest._total) & (2**64 - 1)
        return int(finish(np.asarray([total], np.uint64), np.asarray([self._nbytes], np.uint64))[0])

    def hexdigest(self) -> str:
        return f"{self.intdigest():016x}"
