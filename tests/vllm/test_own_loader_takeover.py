"""A controller that dies between two waves leaves the model half in vLLM's hands, on `meta`: the next one takes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.test_own_loader import loaded_from_disk, session, stock_engine, tokens
from weight_sync.session.landing import Landing, To
from weight_sync.session.session import WeightSync


class Died(BaseException):
    """The controller's process, at this point."""


def died(sync: WeightSync) -> None:
    """Hands over one wave, then is gone: nothing is cleaned up."""
    engine: Any = sync.replicas[0].engine
    feed = engine.feed

    def once(*arguments: Any) -> None:
        feed(*arguments)
        raise Died

    engine.feed, sync._fail = once, lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Died):
        sync.sync(1)


def taken_over(model: Path, export: Path, recover: bool) -> dict[str, Any]:
    llm = stock_engine(model)
    landing = Landing(To.AUTO, 300_000)
    died(session(llm, model, export, landing))
    later = session(llm, model, export, landing)
    facts: dict[str, Any] = {}
    if recover:
        facts["recovered"] = (later.recover().action, later.version)
    facts["why"] = later.connect().by_loader
    later.sync(1)
    return facts | {"tokens": tokens(llm), "serving": later.replicas[0].engine.serving}  # type: ignore[attr-defined]


@pytest.mark.parametrize("recover", [False, True])
def test_a_controller_that_dies_between_two_waves_is_followed_by_one_that_loads_everything(
    checkpoints: Any, forked: Callable[..., Any], recover: bool
) -> None:
    model, export = (checkpoints("qwen3", seed=seed, dtype="bfloat16", num_hidden_layers=2) for seed in (0, 1))
    found, want = forked(taken_over, model, export, recover), forked(loaded_from_disk, export, {})
    assert found.get("recovered") == (("redo", -1) if recover else None)
    assert "qkv_proj.weight: post-processing packed it" in found["why"]
    assert found["tokens"] == want["tokens"]
    assert found["serving"]
