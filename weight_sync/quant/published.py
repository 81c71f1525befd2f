"""From the `quantization_config` of a checkpoint's config.json to a scheme, and to the tensors that stay as they are. Pure.

What is quantised is not said in the same way everywhere. Sources of the rules here:

fp8, mxfp8      `modules_to_not_convert` (transformers) or `ignored_layers` (SGLang, vLLM). DeepSeek-V3 and V3.1 list nothing;
                Qwen3-30B-A3B-FP8 lists lm_head, norms and mlp.gate of every layer by full name. A name excludes the module of
                that path, those below it, and (SGLang) paths that hold it between dots; vLLM takes the path alone.
mxfp4           gpt-oss: paths with `*`; only the stacked experts' gate_up_proj and down_proj exist as blocks and scales.
compressed-     `ignore` of full names and "re:" patterns (matched at the beginning, as re.match does), against modules of the
tensors         classes or names in `targets`. GLM-4.5-FP8 lists lm_head and mlp.gate of every layer; Kimi-K2-Thinking lm_head,
                re:.*self_attn.*, re:.*shared_experts.* and re:.*mlp\\.(gate|up|gate_up|down)_proj.*. SGLang also takes the
                end of a path; a parent's name excludes no child.

Never quantised, whatever a list leaves out, are tensors that no engine builds with a scheme (KEPT): embeddings, norms, routers,
the shared expert's gate, MTP's eh_proj and head, DSA's weights_proj, convolutions, biases and all that is no matrix. lm_head is
only where a target names it: engines take it for no Linear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from weight_sync.errors import ConfigError, listed
from weight_sync.quant.scheme import LoadYaml, Scheme, load_scheme

Rule = Literal["fp8", "mxfp4", "compressed-tensors"]

KEPT: tuple[str, ...] = (
    r"embed_tokens",
    r"[a-z0-9_]*norm",
    r"gate|router|shared_expert_gate",
    r"shared_head(\..*)?",
    r"eh_proj|weights_proj|conv1d",
)
"""Modules that no engine quantises, as patterns of a path from its beginning, or from behind any dot, to its end."""

# One pattern with one way to skip what is in front: a large model asks for 70,000 names.
_KEPT = re.compile(rf"(?:.*\.)?(?:{'|'.join(KEPT)})")

LEGAL = (
    "quant_method fp8 (e4m3, dynamic activations, with weight_block_size or without), mxfp8, mxfp4, compressed-tensors "
    "(one group: float 8 by channel, tensor or block; mxfp8; int 4 symmetric by group, pack-quantized; "
    "mxfp4 and nvfp4 pack-quantized)"
)

_FP8_KEYS = {
    "quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "modules_to_not_convert", "ignored_layers",
    "dequantize",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Excludes:
    """Which modules of a checkpoint stay unquantised. suffix: what a quantised tensor's name has after its module's path."""

    rule: Rule
    names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    suffix: str = ".weight"

    def excluded(self, name: str) -> bool:
        """Whether the module of this HF path keeps its dtype: listed, no target, or never quantised."""
        if _listed(self.rule, self.names, name) or _KEPT.fullmatch(name):
            return True
        last = name.rpartition(".")[2] == "lm_head"
        if not last and "Linear" in self.targets:
            return False
        return not any(target != "Linear" and _named(target, name) for target in self.targets)

    def quantises(self, tensor: str, shape: Sequence[int]) -> bool:
        """Whether the checkpoint holds parts of the tensor of this HF name and shape instead of the tensor itself."""
        if self.rule == "mxfp4" and not self.suffix:
            experts = re.fullmatch(r".*\.experts\.(gate_up_proj|down_proj)", tensor)
            return experts is not None and len(shape) == 3 and not self.excluded(tensor)
        return len(shape) == 2 and tensor.endswith(self.suffix) and not self.excluded(tensor.removesuffix(self.suffix))


def _listed(rule: Rule, names: tuple[str, ...], module: str) -> bool:
    if rule == "compressed-tensors":
        return any(_named(item, module) or ("." + module).endswith("." + item) for item in names)
    if rule == "mxfp4":
        return any(re.match(pattern, module) for pattern in map(_starred, names))
    return any(f".{item.rstrip('.')}." in f".{module}." for item in names)


@lru_cache(maxsize=1024)
def _starred(item: str) -> str:
    """A path with `*` as a pattern of the beginning of one."""
    return ".*".join(map(re.escape, item.split("*"))) + r"(\.|$)"


def _named(item: str, name: str) -> bool:
    return re.match(item[3:], name) is not None if item.startswith("re:") else item == name


def from_hf(config: Mapping[str, Any], load: LoadYaml, scale_dtype: str | None = None) -> tuple[Scheme, Excludes]:
    """Scheme and excludes of a checkpoint from config.json's quantization_config.

    load: reads conf/weight_sync/quant by name. scale_dtype: dtype of the scales in the checkpoint's files, which its config
    does not say: compressed-tensors wrote bfloat16 for long, and computed in it; with float32 it computed in that.
    Raises ConfigError, with what is legal, for a config that no scheme carries out.
    """
    method = config.get("quant_method")
    try:
        if method in ("fp8", "mxfp8"):
            return _fp8(config, load)
        if method == "mxfp4":
            _only(config, {"quant_method", "modules_to_not_convert", "dequantize"})
            return load_scheme("mxfp4_gpt_oss", load), Excludes("mxfp4", _strings(config, "modules_to_not_convert"), suffix="")
        if method == "compressed-tensors":
            return _compressed(config, load, scale_dtype)
    except _Refused as reason:
        raise ConfigError(f"quantization_config of quant_method {method}: {reason}; legal: {LEGAL}") from None
    why = " (its input_scale is calibrated on activations, which a trainer does not have)" if method == "modelopt" else ""
    raise ConfigError(f"quantization_config: quant_method {method!r} is not supported{why}; legal: {LEGAL}")


class _Refused(Exception):
    """Why a quantization_config is refused; from_hf adds the rest of the sentence."""


def _fp8(config: Mapping[str, Any], load: LoadYaml) -> tuple[Scheme, Excludes]:
    _only(config, _FP8_KEYS)
    if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _Refused(f"fmt {fmt!r}")
    if (activations := config.get("activation_scheme", "dynamic")) != "dynamic":
        raise _Refused(f"activation_scheme {activations!r} has input scales calibrated on activations")
    if (scales := config.get("scale_fmt")) not in (None, "ue8m0", "float", "float32"):
        raise _Refused(f"scale_fmt {scales!r}")
    excludes = Excludes("fp8", (*_strings(config, "modules_to_not_convert"), *_strings(config, "ignored_layers")))
    block = config.get("weight_block_size")
    if config["quant_method"] == "mxfp8":
        if block is not None and list(block) != [1, 32]:
            raise _Refused(f"weight_block_size {block} of mxfp8, which has [1, 32]")
        return load_scheme("mxfp8", load), excludes
    if block is None:
        if scales == "ue8m0":
            raise _Refused("scale_fmt ue8m0 without weight_block_size")
        return load_scheme("fp8_tensor", load), excludes
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise _Refused(f"weight_block_size {block}: two positive sizes")
    name = "fp8_block_ue8m0" if scales == "ue8m0" else "fp8_block"
    return load_scheme(name, load, {"group": list(block)}), excludes


def _compressed(config: Mapping[str, Any], load: LoadYaml, scale_dtype: str | None) -> tuple[Scheme, Excludes]:
    groups = list(cast("Mapping[str, Any]", config.get("config_groups") or {}).values())
    if not groups or any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise _Refused(f"{len(groups)} config_groups with different weights, one kind is legal")
    if (config.get("sparsity_config") or {}).get("format") not in (None, "dense"):
        raise _Refused("sparsity_config")
    if config.get("transform_config"):
        raise _Refused("transform_config (weights are rotated before they are quantised)")
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise _Refused(f"quantization_status {status!r}")
    w = cast("Mapping[str, Any]", groups[0].get("weights") or {})
    for group in groups:
        inputs = group.get("input_activations")
        if inputs and inputs.get("dynamic") is False:
            raise _Refused("input_activations that are not dynamic have scales calibrated on activations")
    if not w.get("symmetric", True) or w.get("dynamic", False) or w.get("actorder") in ("group", True):
        raise _Refused("weights that are asymmetric, dynamic or reordered by activations")
    kind, bits, strategy, size = w.get("type", "int"), w.get("num_bits"), w.get("strategy"), w.get("group_size")
    format_ = groups[0].get("format") or config.get("format")
    scheme = _compressed_scheme(kind, bits, strategy, size, format_, w, load)
    if scheme is None:
        raise _Refused(f"weights of {kind} {bits} bits, strategy {strategy}, group_size {size}, format {format_}")
    if scale_dtype is not None and scheme.kind == "fp8" and scheme.scale == "real":
        scheme = _computed_in(scheme, scale_dtype)
    targets = tuple(target for group in groups for target in cast("Sequence[str]", group.get("targets") or ()))
    return scheme, Excludes("compressed-tensors", _strings(config, "ignore"), targets)


def _compressed_scheme(
    kind: Any, bits: Any, strategy: Any, size: int | None, format_: Any, w: Mapping[str, Any], load: LoadYaml
) -> Scheme | None:
    if (kind, bits) == ("int", 4) and strategy == "group" and size and format_ == "pack-quantized":
        return load_scheme("int4_group", load, {"group": [1, size]})
    if (kind, bits) == ("float", 4) and size == 16 and strategy == "tensor_group" and format_ == "nvfp4-pack-quantized":
        return load_scheme("nvfp4", load)
    if (kind, bits) == ("float", 4) and size == 32 and format_ == "mxfp4-pack-quantized":
        return load_scheme("mxfp4", load)
    if (kind, bits) != ("float", 8):
        return None
    if format_ == "mxfp8-quantized" and size == 32:
        return load_scheme("mxfp8_ct", load)
    if format_ not in ("float-quantized", "naive-quantized"):
        return None
    if strategy == "block" and w.get("block_structure"):
        return load_scheme("fp8_block_ct", load, {"group": list(w["block_structure"])})
    return {"channel": load_scheme("fp8_channel", load), "tensor": load_scheme("fp8_tensor_ct", load)}.get(strategy)


def _computed_in(scheme: Scheme, dtype: str) -> Scheme:
    from dataclasses import replace

    if dtype not in ("bfloat16", "float32"):
        raise _Refused(f"scales of dtype {dtype}")
    parts = tuple(replace(part, dtype=dtype) if part.name == "scales" else part for part in scheme.parts)
    zero = 2.0**-7 if dtype == "bfloat16" else 2.0**-23  # eps of the dtype
    return replace(scheme, parts=parts, arithmetic=dtype, scale_arithmetic=dtype, zero=zero)


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise _Refused(f"{key} must be a list of names, got {value!r}")
    return tuple(value)


def _only(config: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(config) - known):
        raise _Refused(f"keys {listed(unknown)} are not known")
