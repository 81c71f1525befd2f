"""Any rank of an SGLang engine, built in this process without servers or torch.distributed.

A replica is SGLang's own model class, constructed as rank `rank` of an engine of the given sizes and filled by SGLang's
own load_weights. Nothing here knows how SGLang fuses, stacks or cuts: that is why a replica can be the oracle for
byte-for-byte tests. Written against SGLang 0.5.23 (runtime_context); it swaps process globals, so one replica at a time.

On a CPU call prepare_cpu() before sglang is first imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from weight_sync.errors import ParallelError

if TYPE_CHECKING:
    import torch

    from weight_sync_integrations.inventory import Inventory

_GROUPS = ("tp", "pp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Parallel sizes of one engine. World size is tp x pp; ep and attn_dp cut the tp ranks once more."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attn_dp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("ep", self.ep), ("attn_dp", self.attn_dp)):
            if size < 1 or self.tp % size:
                legal = [n for n in range(1, self.tp + 1) if self.tp % n == 0]
                raise ParallelError(f"{name}={size} does not divide tp={self.tp}; legal: {legal}")

    @property
    def world(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """One rank's model. coords: its index on tp, pp, attn_tp, attn_dp, moe_ep and moe_tp, and its rank."""

    model: torch.nn.Module
    coords: dict[str, int]
    context: Any

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, as tensors.live_tensors lists them for a server."""
        from weight_sync_integrations.sglang.tensors import live_tensors

        return live_tensors([("target", self.model)])

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Feed HF tensors (name -> full tensor) to the model's own load_weights, as a server does when it starts."""
        import torch

        with self.scope(), torch.no_grad():
            self.model.load_weights(iter(tensors.items()))
            self._postprocess(run_post_load=False)

    def finish(self) -> None:
        """What /end_weight_update does in a server into which bytes were written: derive anew what depends on weights."""
        import torch

        with self.scope(), torch.no_grad():
            self._postprocess(run_post_load=True)

    def loadable(self) -> AbstractContextManager[None]:
        """Inside, load_weights can be called again: SGLang's parameters stay as its loaders need them."""
        return nullcontext()

    def inventory(self) -> Inventory:
        """Every tensor of the model, taking tensors() for what a plan writes."""
        from weight_sync_integrations.inventory import Inventory, Policy
        from weight_sync_integrations.sglang.tensors import RECOMPUTES, RULES, find_all

        policy = Policy(RULES, recomputes=RECOMPUTES)
        where = f"rank {self.coords['rank']}"
        return Inventory(lambda: find_all([("target", self.model)]), self.tensors().values(), policy, where)

    def derived(self) -> dict[str, torch.Tensor]:
        """Tensors that SGLang computes from weights, by name."""
        from weight_sync_integrations.sglang.tensors import find_all

        names = set(self.inventory().names("derived"))
        return {f.name: f.tensor.detach() for f in find_all([("target", self.model)]) if f.name in names}

    def _postprocess(self, run_post_load: bool) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        runner = types.SimpleNamespace(get_model=lambda: self.model, device=next(self.model.parameters()).device.type)
        with as_on_a_gpu() if runner.device == "cpu" else nullcontext():
            WeightUpdater.end_weight_update(runner, run_post_load=run_post_load)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """This rank's context is SGLang's current one inside; not safe across threads."""
        from sglang.srt import runtime_context

        with runtime_context.use_context(self.context):
            yield


def prepare_cpu() -> None:
    """Make SGLang importable in this process on a CPU: its CPU mode and the stand-ins of cpu_site. Safe to repeat.

    Raises: RuntimeError when sglang is already imported without them.
    """
    if "sglang" in sys.modules and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise RuntimeError("prepare_cpu() must come before the first import of sglang")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    name = "weight_sync_sglang_cpu_site"
    stand_ins = sys.modules.get("sitecustomize")
    if name not in sys.modules and not hasattr(stand_ins, "STAND_INS"):
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "cpu_site" / "sitecustomize.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def build_replica(
    checkpoint: str | Path,
    rank: int,
    sizes: EngineSizes = EngineSizes(),
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
    quantization: Any = None,
) -> Replica:
    """Construct rank `rank` (tp fastest, then pp) of an engine serving the folder `checkpoint` (only config.json is read).

    Args:
        device: "cpu", or "meta" for shapes without memory.
        dtype: torch's name of the model dtype.
        quantization: an SGLang QuantizationConfig; None: that of the checkpoint's quantization_config, if it has one.
    Raises: ParallelError where `rank` is not a rank of `sizes`; whatever SGLang raises for sizes it cannot cut.
    """
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    if not 0 <= rank < sizes.world:
        raise ParallelError(f"rank {rank} is not one of the {sizes.world} ranks of tp={sizes.tp} x pp={sizes.pp}")
    config = AutoConfig.from_pretrained(checkpoint)
    context = _context(str(checkpoint), rank, sizes)
    before = torch.get_default_dtype()
    with runtime_context.use_context(context):
        initialize_dp_attention_flags(runtime_context.get_server_args())
        initialize_moe_config()
        model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
        quantization = quantization or _quantization(config, model_class)
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device(device), nullcontext() if torch.cuda.is_available() else as_on_a_gpu():
                model = model_class(config, quant_config=quantization)
        finally:
            torch.set_default_dtype(before)
    parallel = context.parallel
    coords = {
        "rank": rank,
        "tp": parallel.tp_rank,
        "pp": parallel.pp_rank,
        "attn_tp": parallel.attn_tp_rank,
        "attn_dp": parallel.attn_dp_rank,
        "moe_ep": parallel.moe_ep_rank,
        "moe_tp": parallel.moe_tp_rank,
    }
    return Replica(model=model.eval(), coords=coords, context=context)


def _quantization(config: Any, model_class: Any) -> Any:
    """SGLang's own reading of config.json's quantization_config, as its model loader does it."""
    from sglang.srt.layers.quantization import get_quantization_config

    data = getattr(config, "quantization_config", None)
    if data is None:
        return None
    data = data if isinstance(data, dict) else data.to_dict()
    fused = getattr(model_class, "packed_modules_mapping", {})
    return get_quantization_config(data["quant_method"]).from_config(
        {**data, "packed_modules_mapping": fused, "hf_config": config}
    )


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """SGLang's post-processing on a CPU packs weights for AMX tiles, and fp8 needs them; inside, it does what it does on a GPU.

    That is the code for CUDA without DeepGEMM's UE8M0 scales (Hopper and older), on host memory. A stand-in, for replicas.
    """
    import torch
    from sglang.srt.layers.quantization import fp8, unquant

    with ExitStack() as stack:
        for module, name in ((fp8, "_is_cpu"), (unquant, "_is_cpu_amx_available")):
            stack.enter_context(patch.object(module, name, False))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0)))
        yield


def read_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors checkpoint folder, by HF name."""
    from safetensors.torch import load_file

    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(folder / file))
    return tensors


def _context(model_path: str, rank: int, sizes: EngineSizes) -> Any:
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    # SGLang asks for the GPU's generation while it reads the arguments of a model with sparse attention.
    with nullcontext() if torch.cuda.is_available() else patch("torch.cuda.get_device_capability", lambda *args: (9, 0)):
        args = ServerArgs(
            model_path=model_path,
            device="cpu",
            tp_size=sizes.tp,
            pp_size=sizes.pp,
            ep_size=sizes.ep,
            attn_dp_size=sizes.attn_dp,
        )
        context = runtime_context.create_context(args, role="test", ranks=runtime_context.SpawnRanks(world_rank=rank))
    parallel = context.parallel
    handles = {
        f"{name}_group": _rank_only_group(name, getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size"))
        for name in _GROUPS
    }
    parallel.override_permanently(**handles)
    return context


def _rank_only_group(name: str, rank: int, size: int) -> types.SimpleNamespace:
    """What model constructors read of a process group: who I am and how many we are. It cannot communicate."""
    return types.SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        world_size=size,
        ranks=list(range(size)),
        first_rank=0,
        last_rank=size - 1,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=None,
        cpu_group=None,
        unique_name=f"replica:{name}",
    )
