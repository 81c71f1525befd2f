"""Live tensors on a GPU: the same interface as weight_sync.session.memory.Memory, with torch views instead of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from weight_sync.errors import BindError, SessionError
from weight_sync.ids import ITEMSIZE
from weight_sync.session.contracts import LiveStorage
from weight_sync.session.digests import LANES, DeviceDigests, Digests
from weight_sync.session.memory import Memory, not_contiguous


class DeviceMemory(Memory):
    """See Memory. All tensors must be on one CUDA device; nothing is copied from it but what a caller asks for."""

    def __init__(self, tensors: Mapping[str, Any], where: str) -> None:
        super().__init__(tensors, where)
        places = {str(t.device): name for name, t in tensors.items()}
        if len(places) > 1:
            raise BindError(f"{where}: parameters on several devices: {', '.join(f'{n} on {d}' for d, n in places.items())}")
        self._device = next(iter(tensors.values())).device
        self._kept: dict[object, Any] = {}

    @property
    def device(self) -> str:
        return "cuda"

    @property
    def on(self) -> Any:
        """The torch device."""
        return self._device

    def raw(self, name: str) -> Any:
        """The live bytes of a parameter as a uint8 tensor. Raises BindError for one that is not row-major contiguous."""
        return self._words(name).view(self._torch.uint8)

    def view(self, name: str, start: int, strides: Sequence[int], shape: Sequence[int]) -> Any:
        flat = self._words(name)
        self.check_inside(name, len(flat), start, strides, shape)
        return flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset() + start)

    def address(self, name: str) -> int:
        return int(self._words(name).data_ptr())

    def settle(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def digests(self, kind: str) -> Digests:
        if kind != LANES:
            raise SessionError(f"{self.where}: no {kind} on a GPU; both sides of a plan must use {LANES}")
        return DeviceDigests(self._device, self._kept)

    def staging(self, nbytes: int) -> DeviceStaging:
        return DeviceStaging(nbytes, self._device)

    def beside(self, array: Any, into: Any | None = None) -> Any:
        here = self._torch.from_numpy(array)
        return here.to(self._device) if into is None else into.copy_(here)

    @property
    def _torch(self) -> Any:
        import torch  # pyright: ignore[reportMissingImports] - tensors on a GPU are torch's

        return torch

    def _words(self, name: str) -> Any:
        """A parameter's elements as a flat tensor of words of their size."""
        flat = self._flat.get(name)
        if flat is None:
            p = self.param(name)
            if reason := not_contiguous(p):
                raise BindError(f"{self.where}: {name} {reason}")
            words = word_dtype(ITEMSIZE[p.dtype])
            flat = self._flat[name] = self._tensors[name].detach().view(-1).view(words)
        return flat


def word_dtype(size: int) -> Any:
    """torch's dtype for words of so many bytes."""
    import torch  # pyright: ignore[reportMissingImports]

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


class DeviceStaging:
    """A page of device bytes of our own beside the weights; see weight_sync.session.memory.Staging."""

    def __init__(self, nbytes: int, device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @property
    def storage(self) -> LiveStorage:
        return LiveStorage(int(self._buffer.data_ptr()), int(self._buffer.nbytes))

    def region(self, offset: int, like: Any, shape: Sequence[int]) -> Any:
        return self.bytes(offset, prod(shape) * like.element_size()).view(like.dtype).view(tuple(shape))

    def words(self, offset: int, size: int, shape: Sequence[int]) -> Any:
        return self.bytes(offset, prod(shape) * size).view(word_dtype(size)).view(tuple(shape))

    def bytes(self, offset: int, nbytes: int) -> Any:
        return self._buffer[offset : offset + nbytes]
