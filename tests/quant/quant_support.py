"""Schemes as shipped, and weights that are hard to quantise: denormals, huge values, zeros of both signs, constants."""

from __future__ import annotations

from importlib import resources
from typing import Any

import ml_dtypes
import numpy as np
import yaml

from weight_sync.quant.kernel import Job, Stats, kernel_for
from weight_sync.quant.scheme import Pair, Scheme, load_scheme

FOLDER = resources.files("weight_sync_conf").joinpath("weight_sync", "quant")
NAMES = sorted(item.name[:-5] for item in FOLDER.iterdir() if item.name.endswith(".yaml"))


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load(FOLDER.joinpath(f"{name}.yaml").read_text())


def shipped(name: str, **overrides: Any) -> Scheme:
    return load_scheme(name, load, overrides)


def weights(kind: str, shape: Pair, seed: int, dtype: str = "bfloat16") -> np.ndarray[Any, Any]:
    """bfloat16 or float32 values [rows, cols] of a kind that quantising finds hard."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "wide":
        x *= np.exp2(rng.integers(-30, 30, shape))
    elif kind == "denormal":
        x *= np.exp2(rng.integers(-140, -118, shape))
    elif kind == "huge":
        x = np.clip(x * 2.0**126, -(1.74 * 2.0**127), 1.74 * 2.0**127)
    elif kind == "constant":
        x = np.full(shape, x[0, 0])
    elif kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
        x[0, 0] = 1.0
    elif kind == "ties":  # quotients that lie between two values of a format
        x = rng.integers(-120, 121, shape) / 16.0
    else:
        assert kind == "normal", kind
    x[rng.random(shape[0]) < 0.1] = 0
    return x.astype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)


KINDS = ("normal", "wide", "denormal", "huge", "constant", "zeros", "ties")


def words(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.view(f"u{values.itemsize}")


def empty_parts(scheme: Scheme, origin: Pair, size: Pair, shape: Pair) -> dict[str, np.ndarray[Any, Any]]:
    return {part.name: np.full(part.nbytes(origin, size, shape), 0xA5, np.uint8) for part in scheme.parts}


def job_of(scheme: Scheme, values: np.ndarray[Any, Any], origin: Pair = (0, 0), shape: Pair | None = None, **known: Any) -> Job:
    size = (int(values.shape[0]), int(values.shape[1]))
    shape = shape or size
    dtype = "float32" if values.itemsize == 4 else "bfloat16"
    return Job(words(values), dtype, origin, shape, empty_parts(scheme, origin, size, shape), **known)


def quantised(
    scheme: Scheme, values: np.ndarray[Any, Any], backend: str = "numpy", **more: Any
) -> tuple[dict[str, np.ndarray[Any, Any]], Stats]:
    """The bytes of every part as a kernel on the host makes them, and its report."""
    job = job_of(scheme, values, **more)
    prepared = kernel_for(scheme, "cpu", backend).prepare([job])
    prepared.run()
    return dict(job.outs), prepared.stats()
