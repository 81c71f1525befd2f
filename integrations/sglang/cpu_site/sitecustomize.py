"""Stand-ins that let the official SGLang run on a CPU. Python imports this file at start when its folder is on PYTHONPATH.

launch.py puts the folder there for device=cpu servers only; spawned children inherit it. Nothing is installed or
edited. Two things that a CPU machine lacks are replaced, and both replacements are hollow:

sgl_kernel      SGLang imports names from this package of CUDA kernels although the CPU path never calls them. Any name
                can be imported from the stand-in; calling one raises NotImplementedError with that name.
torchvision     the wheel that fits SGLang is a CUDA build, whose C++ library cannot load, so that the two operators which
                its Python code refers to at import time are missing. Their schemas are declared, without kernels, just
                before torchvision is first imported. A torchvision whose library loads is left alone.

A real sgl_kernel wins over the stand-in. Like any sitecustomize, this one hides another one later on the path.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import types

# The submodules SGLang imports unconditionally. Others (scalar_type) it guards with its own fallback, so they stay absent.
STAND_INS = (
    "sgl_kernel",
    *(f"sgl_kernel.{m}" for m in ("elementwise", "flash_attn", "kvcacheio", "mamba", "quantization")),
)
_KEPT: list[object] = []  # a torch Library that is collected takes its schemas with it


class _StandInModule(types.ModuleType):
    """A module of which every name exists and none works."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def stand_in(*args: object, **kwargs: object) -> object:
            raise NotImplementedError(f"{full} is a stand-in for CPU: there is no such kernel on this machine")

        stand_in.__name__ = stand_in.__qualname__ = name
        return stand_in


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path, so it is asked only for what nobody else has."""

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        if fullname in STAND_INS:
            return importlib.machinery.ModuleSpec(fullname, self, origin="CPU stand-in", is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Stand-in for CPU: names can be imported, calls raise."


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """First on sys.meta_path: acts once, when torchvision is looked for, and then finds nothing itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        # Asking the other finders only locates the package; it does not import it.
        spec = importlib.machinery.PathFinder.find_spec("torchvision")
        if spec is not None and spec.origin is not None:
            _declare_missing_operators(os.path.join(os.path.dirname(spec.origin), "_C.so"))
        return spec


def _declare_missing_operators(library_path: str) -> None:
    import torch

    try:
        ctypes.CDLL(library_path)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
sys.meta_path.append(_StandInFinder())
