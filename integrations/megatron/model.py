"""A real Megatron-Core trainer of a Hugging Face checkpoint: build it, take optimiser steps, export it.

This is what the stand-alone job and the tests train with. A user's own trainer (miles, verl, an own loop) has its own
model; the library then needs only MegatronSource. On a machine without CUDA everything runs on gloo with the stand-ins
of cpu.py; TE's kernels are then plain torch.

Every rank of the trainer calls every method of this module together: they are collectives.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weight_sync.errors import BindError, ParallelError, listed
from weight_sync.layout.parallel import TrainerDims
from weight_sync_integrations.megatron import cpu

if TYPE_CHECKING:
    import torch

Optimizer = Literal["distributed", "replicated"]
"""distributed: mcore's DistributedOptimizer, states cut over dp, parameters in contiguous buffers; replicated: plain."""


def build(
    hf_path: str | Path,
    parallel: TrainerDims | Mapping[str, int],
    *,
    seed: int = 0,
    optimizer: Optimizer = "distributed",
    overlap_param_gather: bool = False,
    learning_rate: float = 1e-2,
    dtype: str | None = None,
    vocab_multiple: int = 128,
) -> MegatronTrainer:
    """Build this rank's part of the model, load the checkpoint into it and wrap it for training.

    torch.distributed must be initialised (gloo on a CPU, nccl with CUDA). Model parallelism is initialised here, once
    for each process.

    Args:
        hf_path: a complete Hugging Face checkpoint folder.
        parallel: TrainerDims, or sizes of tp, pp, vpp, ep, etp, cp (missing ones are 1; experts are cut by etp, not tp).
        seed: of the training data, and of dropout where CUDA is available.
        overlap_param_gather: mcore's option: after a step, parameters are stale until the next forward gathers them.
        dtype: of parameters, torch's name without prefix; the checkpoint's by default.
        vocab_multiple: vocabulary rows are padded to a multiple of this times tp (Megatron-LM's default; the bridge
            alone would choose a smaller one).

    Raises: ParallelError for sizes that do not fit the world, or cp above 1 without CUDA.
    """
    import torch

    on_cpu = cpu.install()
    world = torch.distributed.get_world_size()
    dims = parallel if isinstance(parallel, TrainerDims) else trainer_dims(parallel, world)
    if dims.world != world:
        raise ParallelError(f"the trainer is declared with {dims.world} ranks, but {world} have joined")
    if on_cpu and dims.cp > 1:
        raise ParallelError(f"cp={dims.cp}: context-parallel attention needs Transformer Engine; without CUDA use cp=1")
    if dims.pipeline is not None:
        raise ParallelError("trainer.pipeline: this trainer splits layers evenly over stages; leave it out")

    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.etp,
        context_parallel_size=dims.cp,
        order=dims.order,
    )
    if on_cpu:
        # The CUDA tracker wants a device; this one forks nothing, which is right as long as nothing drops out.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    else:
        tensor_parallel.random.model_parallel_cuda_manual_seed(seed)

    config = json.loads((Path(hf_path) / "config.json").read_text())
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    bridge = AutoBridge.from_hf_pretrained(str(hf_path))
    provider = bridge.to_megatron_provider(load_weights=False)
    _configure(provider, dims, getattr(torch, dtype), on_cpu)
    provider.make_vocab_size_divisible_by = vocab_multiple
    provider.finalize()

    distributed = optimizer == "distributed"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_param_gather,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=distributed,
        check_for_nan_in_grad=False,
    )
    with cpu.device_mode():
        chunks = provider.provide_distributed_model(ddp_config=ddp_config, wrap_with_ddp=True, use_cpu_initialization=on_cpu)
        with _padded_vocabulary():
            bridge.load_hf_weights(chunks)
        half = dtype == "bfloat16"
        opt = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=learning_rate,
                weight_decay=0.0,
                clip_grad=1.0,
                bf16=half,
                params_dtype=getattr(torch, dtype),
                use_distributed_optimizer=distributed,
                overlap_param_gather=overlap_param_gather,
            ),
            chunks,
        )
    return MegatronTrainer(chunks, opt, bridge, dims, Path(hf_path), seed)


def trainer_dims(parallel: Mapping[str, int], world: int) -> TrainerDims:
    """TrainerDims of `world` ranks from sizes by axis. Raises ParallelError for an axis that does not exist."""
    axes = ("tp", "pp", "vpp", "ep", "etp", "cp")
    unknown = sorted(set(parallel) - set(axes))
    if unknown:
        raise ParallelError(f"no parallel axis {', '.join(unknown)}; a Megatron trainer has {', '.join(axes)} (dp follows)")
    dims = TrainerDims(ranks=world, **{axis: int(size) for axis, size in parallel.items()})
    if dims.vpp > 1 and dims.pp == 1:
        raise ParallelError(f"vpp={dims.vpp} needs pp of at least 2; pp is 1")
    return dims


def _configure(provider: Any, dims: TrainerDims, dtype: torch.dtype, on_cpu: bool) -> None:
    """Set parallel sizes and dtype on the bridge's provider, and switch off what a CPU does not have."""
    import torch

    settings: dict[str, Any] = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": dims.vpp if dims.vpp > 1 else None,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "context_parallel_size": dims.cp,
        "sequence_parallel": dims.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": False,
        "should_pad_vocab": True,
    }
    if on_cpu:
        settings |= {
            "use_cpu_initialization": True,
            "perform_initialization": False,  # every weight is loaded
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "cross_entropy_loss_fusion": False,
            "moe_permute_fusion": False,
            "moe_shared_expert_overlap": False,
            "moe_token_dispatcher_type": "allgather",  # gloo has no all-to-all with uneven splits
            "batch_p2p_comm": False,
            "batch_p2p_sync": False,
        }
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise BindError(f"{type(provider).__name__} of the installed megatron-bridge has no setting {name}")
        setattr(provider, name, value)
    provider.moe_grouped_gemm = bool(provider.num_moe_experts)
    spec = provider.transformer_layer_spec
    if on_cpu and isinstance(spec, partial) and spec.keywords.get("use_transformer_engine") is False:
        # Some families' bridges chose the local spec when they were imported without TE; the stand-ins make it wrong.
        provider.transformer_layer_spec = partial(spec, use_transformer_engine=True)


@contextlib.contextmanager
def _padded_vocabulary() -> Iterator[None]:
    """megatron-bridge 0.6.2 pads the vocabulary while it cuts it, so not at tp=1, and then refuses the shape."""
    from megatron.bridge.models.conversion.param_mapping import ColumnParallelMapping

    original = ColumnParallelMapping.hf_to_megatron

    def hf_to_megatron(self: Any, weights: torch.Tensor, module: Any) -> torch.Tensor:
        import torch

        result = original(self, weights, module)
        if self.tp_size > 1 or self.megatron_param not in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return result
        missing = module.weight.shape[0] - result.shape[0]
        return torch.nn.functional.pad(result, (0, 0, 0, missing)) if missing > 0 else result

    ColumnParallelMapping.hf_to_megatron = hf_to_megatron
    try:
        yield
    finally:
        ColumnParallelMapping.hf_to_megatron = original


class MegatronTrainer:
    """One rank's model chunks with their optimiser.

    Attributes:
        chunks: the rank's model chunks, one for each virtual pipeline stage, wrapped in mcore's DDP.
        optimizer: mcore's optimiser over them.
        bridge: the AutoBridge of the checkpoint.
        sizes: parallel dims.
    """

    def __init__(self, chunks: list[Any], optimizer: Any, bridge: Any, dims: TrainerDims, hf_path: Path, seed: int) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        self.chunks = chunks
        self.optimizer = optimizer
        self.bridge = bridge
        self.dims = dims
        self._hf_path = hf_path
        self._seed = seed
        self._steps = 0
        config = get_model_config(chunks[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if chunks[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def train_step(self, *, sequence_length: int = 32, batch: int = 2) -> float:
        """One optimiser step on random tokens. Returns the mean loss of all data-parallel ranks, on every rank."""
        import torch
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        microbatches = max(2, self.dims.pp)  # the interleaved schedule wants a multiple of pp
        generator = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + self._steps) * 4_099 + parallel_state.get_data_parallel_rank()
        )
        vocab = self.bridge.hf_pretrained.config.vocab_size
        shape = (microbatches, batch, sequence_length + 1)
        device = torch.device("cpu") if cpu.needed() else torch.device("cuda", torch.cuda.current_device())
        tokens = torch.randint(0, vocab, shape, generator=generator).to(device)
        iterators = [iter(tokens) for _ in self.chunks]
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with cpu.device_mode():
            results = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=microbatches,
                seq_length=sequence_length,
                micro_batch_size=batch,
                forward_only=False,
            )
            self.optimizer.step()
        self._steps += 1
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for result in results:
            total += torch.tensor([result["loss"].item(), 1.0], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)  # only last stages have losses
        return float(total[0] / total[1])

    def export_hf(self, path: str | Path) -> Path:
        """Write the current weights as a complete Hugging Face checkpoint, by Megatron-Bridge's gather.

        This is the oracle that a sync is checked against, and what a user would otherwise do: every rank holds every
        full tensor in turn. Rank 0 writes; all ranks return when the folder is complete.
        """
        import torch
        from safetensors.torch import save_file

        path = Path(path)
        tensors = dict(self.exported())
        if torch.distributed.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            for name in ("config.json", "generation_config.json"):
                if (self._hf_path / name).exists():
                    shutil.copyfile(self._hf_path / name, path / name)
            dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.dim() > 1}
            config = json.loads((path / "config.json").read_text())
            if len(dtypes) == 1:
                config.pop("torch_dtype", None)
                config["dtype"] = dtypes.pop()
            (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        torch.distributed.barrier()
        return path

    def gather_parameters(self) -> None:
        """Make every rank's parameters those of the last step, where the all-gather overlaps with the next forward."""
        import torch

        with torch.no_grad():
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the Hugging Face checkpoint, whole, one after another, on every rank: weight_sync.session.exported's
        Export. A collective.

        The bridge's stream, put right against the loaded checkpoint's names and shapes.

        megatron-bridge 0.6.2 exports padded vocabulary rows, an lm_head for tied models, and squeezes dims of size 1
        in the expert gather. Anything else that differs is an error.
        """
        self.gather_parameters()
        expected = checkpoint_shapes(self._hf_path)
        tied = bool(self.bridge.hf_pretrained.config.tie_word_embeddings)
        seen: set[str] = set()
        for name, tensor in self.bridge.export_hf_weights(self.chunks, cpu=True, show_progress=False):
            if name == "lm_head.weight" and tied and name not in expected:
                continue
            if name not in expected:
                raise BindError(f"the bridge exported {name}, which the checkpoint {self._hf_path} does not have")
            shape = expected[name]
            if tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
                tensor = tensor[: shape[0]]
            if tensor.numel() != prod(shape):
                raise BindError(f"the bridge exported {name} as {list(tensor.shape)}; the checkpoint has {list(shape)}")
            seen.add(name)
            yield name, tensor.detach().reshape(shape).clone()
        missing = sorted(set(expected) - seen)
        if missing:
            raise BindError(f"the bridge did not export {len(missing)} tensors of the checkpoint: {listed(missing)}")


def checkpoint_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a folder's safetensors files, read from their headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    if not shapes:
        raise BindError(f"no *.safetensors file in {path}")
    return shapes


def _forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """mcore's forward-step contract: model output, and the function that turns it into (loss, {"loss": ...})."""
    import torch

    tokens = next(data)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    future = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    output = model(inputs, positions, future, labels=labels)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach().clone()}  # mcore divides `mean` by the number of microbatches, in place

    return output, loss
