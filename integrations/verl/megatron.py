"""What verl's Megatron engine alone knows of its layout: verl's config does not say how layers are spread over stages in the
end, nor how the vocabulary is padded. It is read from the engine that verl has built, by mcore's own functions; whether the
live parameters are so is checked when they are bound, like everything that is declared.
"""

from __future__ import annotations

from typing import Any


def built(engine: Any) -> dict[str, Any]:
    """pipeline: layers of each virtual stage in model order, None with one stage. vocab_multiple: rows of the vocabulary are
    padded to a multiple of this times tp; 1 where the bridge pads nothing, which is its default.

    engine: verl's MegatronEngine, initialised.
    """
    config, provider = engine.tf_config, engine.provider
    padded = bool(getattr(provider, "should_pad_vocab", False))  # no provider: the older mbridge, which pads nothing
    return {
        "pipeline": _pipeline(config),
        "vocab_multiple": int(provider.make_vocab_size_divisible_by) if padded else 1,
    }


def _pipeline(config: Any) -> list[int] | None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if stages == 1:
        return None
    order = [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]
    if (layout := config.pipeline_model_parallel_layout) is not None:
        return [layout.layout[stage][chunk].count(LayerType.decoder) for stage, chunk in order]
    return [get_num_layers_to_build(config, chunk if chunks > 1 else None, stage) for stage, chunk in order]
