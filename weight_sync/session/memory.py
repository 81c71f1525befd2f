"""Live tensors as plain bytes: describe, read, write and digest the regions that a plan speaks of.

Takes torch tensors or numpy arrays by duck typing, so that this package needs no torch. `memory_of` gives host memory or a
GPU's (weight_sync.session.device_memory); a tensor on any other device is refused by name.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.errors import BindError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.box import row_major
from weight_sync.session.contracts import LiveParam, LiveStorage
from weight_sync.session.digests import Digests, HostDigests
from weight_sync.session.places import Places

Bytes = NDArray[np.uint8]
DEVICES = ("cpu", "cuda")

_WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PROCESS_NONCE = secrets.randbits(48)
"""Differs for every process, so that an epoch of a restarted process never equals the old one."""


def describe(tensors: Mapping[str, Any], where: str) -> tuple[tuple[LiveParam, ...], tuple[LiveStorage, ...]]:
    """Parameters and the distinct storages they live in, in the order given.

    where: "rollout rank 3", for errors. Raises BindError for tensors that cannot be addressed: other devices, no bytes, unknown
    dtypes.
    """
    problems: list[str] = []
    params: list[LiveParam] = []
    storages: list[LiveStorage] = []
    index: dict[int, int] = {}
    for name, tensor in tensors.items():
        dtype = dtype_name(tensor)
        reason = _refused(tensor, dtype)
        if reason:
            problems.append(f"{name} {reason}")
            continue
        address, nbytes, offset = _storage(tensor)
        need = offset + _extent(tensor) * ITEMSIZE[dtype]
        if need > nbytes:
            problems.append(f"{name} needs {need} bytes of its storage, which has {nbytes}")
            continue
        if address not in index:
            index[address] = len(storages)
            storages.append(LiveStorage(address, nbytes))
        params.append(LiveParam(name, tuple(tensor.shape), _element_stride(tensor), dtype, index[address], offset))
    if problems:
        raise BindError(f"{where}: {len(problems)} of {len(tensors)} parameters cannot be addressed: {listed(problems)}")
    return tuple(params), tuple(storages)


def epoch_of(storages: Sequence[LiveStorage]) -> int:
    """Equal as long as the process lives and no storage moves; 48 bits, so that it survives JSON everywhere."""
    text = f"{PROCESS_NONCE}:{os.getpid()}:{[(s.address, s.nbytes) for s in storages]}"  # a fork has the nonce of its parent
    return xxhash.xxh3_64_intdigest(text.encode()) & (2**48 - 1)


def dtype_name(tensor: Any) -> str:
    """torch's name of the dtype. Arrays of dtypes numpy lacks carry it in `dtype_label`."""
    return getattr(tensor, "dtype_label", None) or str(tensor.dtype).removeprefix("torch.")


def _refused(tensor: Any, dtype: str) -> str | None:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device not in DEVICES:
        return f"is on device {device}; known: {', '.join(DEVICES)}"
    if dtype not in ITEMSIZE:
        return f"has dtype {dtype}; known: {', '.join(ITEMSIZE)}"
    if prod(tensor.shape) and _storage(tensor)[1] == 0:
        return "has elements but an empty storage (offloaded, packed away or freed)"
    return None


def _storage(tensor: Any) -> tuple[int, int, int]:
    """(address of the storage, its bytes, byte offset of the tensor's first element)."""
    if isinstance(tensor, np.ndarray):
        base: Any = tensor
        while isinstance(base.base, np.ndarray):
            base = base.base
        address = int(base.ctypes.data)
        return address, int(base.nbytes), int(tensor.ctypes.data) - address
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.nbytes()), int(tensor.storage_offset()) * int(tensor.element_size())


def _extent(tensor: Any) -> int:
    """Elements from the first to one past the last."""
    shape = tuple(tensor.shape)
    if not prod(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, _element_stride(tensor), strict=True))


def _element_stride(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, np.ndarray):
        return tuple(step // tensor.itemsize for step in tensor.strides)
    return tuple(tensor.stride())


def memory_of(tensors: Mapping[str, Any], where: str) -> Memory:
    """The live tensors as a Memory of the device that they are on."""
    if device_of(tensors) == "cuda":
        from weight_sync.session.device_memory import DeviceMemory

        return DeviceMemory(tensors, where)
    return Memory(tensors, where)


class Memory:
    """Read and write access to live parameters in host memory by name. Keeps the tensors alive, holds no copy."""

    def __init__(self, tensors: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._tensors = dict(tensors)
        self.params, self.storages = describe(tensors, where)
        self._by_name = {p.name: p for p in self.params}
        self._flat: dict[str, Any] = {}
        self._at = Places(tensors)

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def on(self) -> Any:
        """The device as its own library knows it; nothing on the host."""
        return None

    @property
    def epoch(self) -> int:
        return epoch_of(self.storages)

    def moved(self, tensors: Mapping[str, Any]) -> str | None:
        """How `tensors` as they are now differ from those seen before (names, shapes, dtypes, places), or None."""
        if self._unmoved(tensors):
            return None
        old, new = self._places(), memory_of(tensors, self.where)._places()
        return listed(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))) or None

    def _unmoved(self, tensors: Mapping[str, Any]) -> bool:
        """Whether the same elements lie where they lay: much cheaper to see than to describe everything anew.

        What is compared was noted when it was bound: a tensor object may get another memory, shape or dtype in place.
        """
        return self._at.same(tensors)

    def _places(self) -> dict[str, tuple[Any, ...]]:
        return {p.name: (p.shape, p.stride, p.dtype, p.offset, self.storages[p.storage]) for p in self.params}

    def param(self, name: str) -> LiveParam:
        if name not in self._by_name:
            raise BindError(f"{self.where} has no parameter {name}; it has {listed(self._by_name)}")
        return self._by_name[name]

    def address(self, name: str) -> int:
        """Address of a parameter's first element. Raises BindError for a parameter that is not row-major contiguous."""
        return int(self._array(name).ctypes.data)

    def view(self, name: str, start: int, strides: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """The region as a strided array of words over the live bytes. Raises BindError when it leaves the parameter."""
        flat = self._array(name)
        self.check_inside(name, len(flat), start, strides, shape)
        steps = tuple(step * flat.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(flat[start:], tuple(shape), steps)

    def check_inside(self, name: str, numel: int, start: int, strides: Sequence[int], shape: Sequence[int]) -> None:
        last = start + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        if start < 0 or last >= numel:
            raise BindError(f"{self.where}: elements [{start}, {last}] leave {name}, which has {numel}")

    def raw(self, name: str) -> Any:
        """The live bytes of a parameter. Raises BindError for a parameter that is not row-major contiguous."""
        return self._array(name).view(np.uint8)

    def settle(self) -> None:
        """Return once everything asked of the device so far is done, so that a transport finds it. Nothing to wait for here."""

    def digests(self, kind: str) -> Digests:
        """A new set of digests of regions of this memory; kind: XXH3 or LANES, as on the other side."""
        return HostDigests(kind)

    def staging(self, nbytes: int) -> Any:
        return Staging(nbytes)

    def beside(self, array: NDArray[Any], into: Any | None = None) -> Any:
        """An array where this memory is: itself here, a copy on a GPU. into: a copy that it had before, to be filled again."""
        return array

    def _array(self, name: str) -> NDArray[Any]:
        array = self._flat.get(name)
        if array is None:
            p = self.param(name)
            if reason := not_contiguous(p):
                raise BindError(f"{self.where}: {name} {reason}")
            words = _WORDS[ITEMSIZE[p.dtype]]
            raw = raw_bytes(self.storages[p.storage].address + p.offset, prod(p.shape) * ITEMSIZE[p.dtype])
            array = self._flat[name] = raw.view(words)
        return array


def device_of(tensors: Mapping[str, Any]) -> str:
    """As RankDescription.device has it: "cuda" where any tensor is on a GPU (a mixture is refused when it is bound)."""
    types = {getattr(getattr(t, "device", None), "type", "cpu") for t in tensors.values()}
    return "cuda" if "cuda" in types else "cpu"


def not_contiguous(p: LiveParam) -> str | None:
    """Why a parameter cannot be written in place, or None."""
    live = tuple(s for s, n in zip(p.stride, p.shape, strict=True) if n != 1)
    if live == tuple(s for s, n in zip(row_major(p.shape), p.shape, strict=True) if n != 1):
        return None
    return (
        f"has shape {list(p.shape)} and stride {list(p.stride)}; only row-major contiguous parameters can be written in place"
    )


def raw_bytes(address: int, nbytes: int) -> Bytes:
    """Memory of this process as an array. The caller keeps the owner alive."""
    owned: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(owned, np.uint8)


class Staging:
    """A page of bytes of our own beside the weights, for packing and unpacking."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = np.zeros(nbytes, np.uint8)

    @property
    def storage(self) -> LiveStorage:
        return LiveStorage(int(self._buffer.ctypes.data), int(self._buffer.nbytes))

    def region(self, offset: int, like: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """`shape` words of like's kind from byte `offset`."""
        return self.bytes(offset, prod(shape) * like.itemsize).view(like.dtype).reshape(shape)

    def words(self, offset: int, size: int, shape: Sequence[int]) -> NDArray[Any]:
        """Words of `size` bytes from byte `offset`, in row-major order."""
        return self.bytes(offset, prod(shape) * size).view(_WORDS[size]).reshape(shape)

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        return self._buffer[offset : offset + nbytes]
