"""Random models and parallel sizes that are legal by construction, and the declared layouts that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import lcm
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st
from layout_naive import Array, Engine, Mcore, Params, Sizes

from weight_sync.errors import FamilyError
from weight_sync.layout.family import (
    Convention,
    FamilyFile,
    Model,
    apply,
    engine_convention,
    load_convention,
    load_family,
    mcore_convention,
)
from weight_sync.layout.parallel import TRAINER_ORDERS, EngineDims, TrainerDims
from weight_sync.layout.resolve import resolve
from weight_sync.layout.table import Layout


def shipped(kind: str, name: str) -> Mapping[str, Any]:
    """The parsed YAML of a family or engine file that comes with the package."""
    folder = files("weight_sync_conf") / "weight_sync" / kind
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.name.removesuffix(".yaml") for p in folder.iterdir())
        raise FamilyError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    return yaml.safe_load(path.read_text())


@cache
def family(name: str) -> FamilyFile:
    return load_family(name, lambda n: shipped("family", n))


@cache
def engine(name: str = "sglang") -> Convention:
    return engine_convention(load_convention(name, lambda n: shipped("engine", n)))


def model(sizes: Sizes) -> Model:
    return apply(family(sizes.family), sizes.config())


def trainer_dims(job: Mcore) -> TrainerDims:
    order = TRAINER_ORDERS[0] if job.pp_fastest_last else TRAINER_ORDERS[1]
    return TrainerDims(
        job.ranks, tp=job.tp, pp=job.pp, vpp=job.vpp, ep=job.ep, etp=job.etp, cp=job.cp, order=order, pipeline=job.virtual
    )


def engine_dims(e: Engine) -> EngineDims:
    return EngineDims(tp=e.tp, pp=e.pp, attn_dp=e.attn_dp, moe_ep=e.moe_ep, engines=e.engines, remainder=e.extra)


def trainer_layout(sizes: Sizes, job: Mcore, vocab_multiple: int) -> Layout:
    m = model(sizes)
    return resolve(m, mcore_convention(m.family), trainer_dims(job), "trainer", vocab_multiple=vocab_multiple)


def rollout_layout(sizes: Sizes, e: Engine) -> Layout:
    return resolve(model(sizes), engine(), engine_dims(e), "rollout")


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Sizes, Mcore, Engine, int]:
    """(model, trainer, rollout, vocabulary multiple of the trainer)."""
    moe = draw(st.booleans())
    tp, pp, vpp = draw(
        st.sampled_from([(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (2, 2, 2), (1, 2, 2)])
    )
    cp = draw(st.sampled_from([1, 1, 2]))
    ep, etp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])) if moe else (1, 1)
    pp_last = draw(st.booleans()) or tp * cp != etp * ep
    ranks = pp * lcm(tp * cp, etp * ep) * draw(st.sampled_from([1, 1, 2]))
    attn_tp, attn_dp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (1, 4), (8, 1)]))
    engine_tp = attn_tp * attn_dp
    moe_ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if engine_tp % n == 0])) if moe else 1
    engine_pp = draw(st.sampled_from([1, 1, 2, 3]))
    engines = draw(st.sampled_from([1, 1, 2])) if engine_tp * engine_pp <= 8 else 1

    head_dim = draw(st.sampled_from([2, 4]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n % attn_tp == 0 or attn_tp % n == 0]))
    heads = lcm(kv_heads, attn_tp) * draw(st.integers(1, 2))
    while heads * head_dim % tp or (heads + 2 * kv_heads) * head_dim % tp:
        heads *= 2
    stages = pp * vpp
    if draw(st.booleans()):
        layers, virtual = stages * draw(st.integers(1, 2)), None
    else:
        virtual = tuple(draw(st.integers(0, 2)) for _ in range(stages))
        layers = sum(virtual)
        if layers < engine_pp:
            virtual = (virtual[0] + engine_pp, *virtual[1:])
            layers = sum(virtual)
    while layers < engine_pp:
        layers += stages
    sizes = Sizes(
        hidden=draw(st.integers(1, 5)),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=lcm(tp, engine_tp) * draw(st.integers(1, 2)),
        vocab=draw(st.integers(1, 40)),
        experts=lcm(ep, moe_ep) * draw(st.integers(1, 2)) if moe else 0,
        expert_ffn=lcm(etp, engine_tp // moe_ep) * draw(st.integers(1, 2)) if moe else 0,
        step=draw(st.sampled_from([1, 1, 2])),
        mlp_only=tuple(sorted(draw(st.sets(st.integers(0, layers - 1), max_size=2)))) if moe else (),
        # SGLang's Qwen3-MoE has no tied head to speak of.
        tied=draw(st.booleans()) and not moe,
    )
    job = Mcore(ranks, tp, cp, pp, vpp, ep, etp, virtual, pp_last)
    extra = draw(st.sampled_from(["last", "inner"]))
    return sizes, job, Engine(engine_tp, engine_pp, attn_dp, moe_ep, engines, extra), tp * draw(st.integers(1, 9))


def elements(start: int, strides: Any, shape: Any) -> Array:
    """Where each element of a box lies in its parameter: an index array of the box's shape."""
    index = np.asarray(start, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        index = index[..., None] + np.arange(size, dtype=np.int64) * stride
    return index


def cut(array: Array, offset: Any, shape: Any) -> Array:
    return array[(*(slice(o, o + s) for o, s in zip(offset, shape, strict=True)), ...)]


def assemble(layout: Layout, hf: Mapping[str, Array]) -> Params:
    """Every rank's parameters as the shards of a layout say; -1 where no shard writes, an error where two do."""
    result: Params = []
    for rank in range(layout.world):
        mine = {p.name: np.full(p.numel, -1, np.int64) for p in layout.rank_params(rank)}
        for s in layout.rank_shards(rank):
            at = elements(s.start, s.strides, s.box.shape)
            assert (mine[s.param][at] == -1).all(), f"{s} writes elements that another shard wrote"
            mine[s.param][at] = cut(hf[s.tensor], s.box.offset, s.box.shape)
        result.append({p.name: mine[p.name].reshape(p.shape) for p in layout.rank_params(rank)})
    return result


def read_back(layout: Layout, params: Params, hf: Mapping[str, Array]) -> dict[str, Array]:
    """The HF tensors that the shards find in the parameters: the inverse of assemble. -1 where no shard reads."""
    result = {name: np.full(array.shape, -1, np.int64) for name, array in hf.items()}
    for rank in range(layout.world):
        for s in layout.rank_shards(rank):
            found = params[rank][s.param].ravel()[elements(s.start, s.strides, s.box.shape)]
            into = cut(result[s.tensor], s.box.offset, s.box.shape)
            assert ((into == -1) | (into == found)).all(), f"{s}: two ranks disagree"
            into[...] = found
    return result


def same(have: Params, want: Params) -> None:
    """Assert that two sides hold the same parameters with the same elements."""
    assert len(have) == len(want)
    for rank, (a, b) in enumerate(zip(have, want, strict=True)):
        assert a.keys() == b.keys(), f"rank {rank}"
        for name in b:
            assert a[name].shape == b[name].shape, f"rank {rank} {name}"
            assert (a[name] == b[name]).all(), f"rank {rank} {name}"


def fillings(params: Params) -> list[dict[str, int]]:
    return [{name: int((array == -1).sum()) for name, array in mine.items()} for mine in params]


def declared_fillings(layout: Layout) -> list[dict[str, int]]:
    return [{p.name: p.filling for p in layout.rank_params(rank)} for rank in range(layout.world)]
