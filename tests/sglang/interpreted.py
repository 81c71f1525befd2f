"""Triton's interpreter as the tests need it. Import it with TRITON_INTERPRET=1, before anything else imports triton."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import triton.runtime.interpreter as interpreter

FLOATS = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp8e4nv": ml_dtypes.float8_e4m3fn}


def rounding() -> None:
    """Conversions between float formats as on a GPU: the interpreter cuts bits off where that rounds, and does not saturate."""

    def converted(x: Any, source: Any, target: Any, _: Any) -> Any:
        x = x.view(FLOATS[source.name])
        with np.errstate(all="ignore"):
            return (np.clip(x, -448, 448) if target.name == "fp8e4nv" else x).astype(FLOATS[target.name])

    interpreter._convert_float = converted


def one_at_a_time() -> None:
    """Launches of several threads wait for each other: which program runs, the interpreter keeps in globals."""
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def alone(self: Any, *arguments: Any, **named: Any) -> None:
        with lock:
            launch(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = alone
