"""Run Megatron-Core and Megatron-Bridge on a machine without CUDA, Transformer Engine and Triton.

This is for development, tests and the CPU demo. install() refuses to do anything where CUDA is available: on a GPU
machine the real Transformer Engine, Triton and streams must be used, and a missing one must fail in its own words.

What is put in place, and why (seen with megatron-core 0.19.2 and megatron-bridge 0.6.2):

    typing.override        both packages import it; Python 3.11 does not have it yet.
    torch._dynamo off      mcore compiles small functions at their first call, which costs seconds for each on a CPU.
    transformer_engine     two LoRA modules of the bridge import it without asking; they alone see a stub, while they load.
    triton                 a few mcore modules decorate kernels at import. The stub exists during that import only, after
                           torch has found out for itself that there is no Triton.
    torch.cuda             current_device, synchronize, streams and Tensor.cuda are called unconditionally.
    leaf modules           cpu_leaves.py: the production specs build on pure-torch stand-ins for the TE modules.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

_installed = False

_NEEDS_STUB = frozenset({"megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora"})
_TE_NAMES = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm")


def needed() -> bool:
    """Whether this process has no CUDA device, so that Megatron needs install()."""
    import torch

    return not torch.cuda.is_available()


def install() -> bool:
    """Import megatron.core and megatron.bridge, with stand-ins on a machine without CUDA. Idempotent.

    Call it before anything else imports megatron; the first call takes about ten seconds, so a process that
    makes several ranks calls it once and forks.

    Returns: True where the stand-ins are active, False where CUDA is available and nothing was changed.
    """
    global _installed
    if _installed:
        return True
    if not needed():
        return False
    if not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    with _quiet_imports(), _triton_stub(), _transformer_engine_stub():
        _harmless_cuda()
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.bridge")
        leaves = importlib.import_module("weight_sync_integrations.megatron.cpu_leaves")
        leaves.install()
    _installed = True
    return True


def device_mode() -> contextlib.AbstractContextManager[object]:
    """A context in which device="cuda" means the CPU, for mcore code that writes the device out; empty with CUDA.

    Needed around optimiser construction and training steps. mcore's optimizers also tell dtypes apart by the string
    of Tensor.type(), so inside the context a CPU tensor answers as a CUDA one does.
    """
    if not _installed:
        return contextlib.nullcontext()
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaMeansCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = "cpu"
            result = func(*args, **kwargs)
            if func is torch.Tensor.type and isinstance(result, str) and not result.startswith("torch.cuda."):
                return result.replace("torch.", "torch.cuda.", 1)
            return result

    return CudaMeansCpu()


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """The bridge reports every absent optional package with a traceback, at INFO, and takes over the root logger.

    That Transformer Engine is absent is known here, and how the process logs is the caller's business.
    """
    root, disabled = logging.getLogger(), logging.root.manager.disable
    level, handlers = root.level, list(root.handlers)
    logging.disable(max(disabled, logging.INFO))
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


class _NoStream:
    """Stands for torch.cuda.Stream and Event: on a CPU every operation is finished when it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _harmless_cuda() -> None:
    import torch

    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.Stream = _NoStream
    torch.cuda.Event = _NoStream
    torch.cuda.current_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


@contextlib.contextmanager
def _transformer_engine_stub() -> Iterator[None]:
    """While the bridge is imported, its LoRA modules find a transformer_engine whose classes cannot be instantiated."""
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    finder = _StubFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _StubFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NEEDS_STUB:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _StubLoader(spec.loader)
        return spec


class _StubLoader(importlib.abc.Loader):
    """Loads one module as its own loader would, with the transformer_engine stub importable meanwhile."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        stub = _transformer_engine_modules()
        sys.modules.update(stub)
        try:
            self._inner.exec_module(module)
        finally:
            for name in stub:
                del sys.modules[name]


def _transformer_engine_modules() -> dict[str, types.ModuleType]:
    import torch

    class Absent(torch.nn.Module):
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("transformer_engine is not installed on this machine: LoRA layers that use it cannot run")

    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__path__ = []
    for name in _TE_NAMES:
        setattr(pytorch, name, type(name, (Absent,), {}))
    pytorch.ops = types.SimpleNamespace(  # type: ignore[attr-defined]
        Sequential=type("Sequential", (Absent,), {}), Linear=type("Linear", (Absent,), {})
    )
    package.pytorch = pytorch  # type: ignore[attr-defined]
    return {"transformer_engine": package, "transformer_engine.pytorch": pytorch}


class _TritonName:
    """Any name looked up in the triton stub: usable as an annotation or a decorator, never called for work."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def _undecorated(*args: Any, **kwargs: Any) -> Any:
    """triton.jit and friends, with or without arguments: the function as it was."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


@contextlib.contextmanager
def _triton_stub() -> Iterator[None]:
    """Make `import triton` succeed for the duration, unless Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module("torch._dynamo")
        yield
        return
    # These decide once, at import or first call, whether Triton exists. They must decide before the stub does.
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.runtime.hints"):
        importlib.import_module(module)
    triton_checks = importlib.import_module("torch.utils._triton")
    triton_checks.has_triton_package()
    triton_checks.has_triton()

    def any_name(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _TritonName

    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    for module in (triton, language):
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__getattr__ = any_name  # type: ignore[method-assign]
    triton.__dict__.update(
        jit=_undecorated, autotune=_undecorated, heuristics=_undecorated, language=language, __version__="3.0.0"
    )
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
