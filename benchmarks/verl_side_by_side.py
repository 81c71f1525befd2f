"""One verl job, the same actors, the same vLLM server, the same bytes: our backend against what verl itself can run on a CPU.

    envs/build.sh verl
    .venvs/verl/bin/python benchmarks/verl_side_by_side.py [--hidden 512] [--layers 8] [--tp 2] [--syncs 7]

ours    backend weight_sync: every actor rank writes its FSDP2 shards into the engine's live weights, digests compared
verl    backend mooncake, verl's own: every tensor is gathered whole (full_tensor), rank 0 hands buckets of them to the
        rollout workers one after another (Mooncake, tcp), and these load them into the server through shared memory

Both go through CheckpointEngineManager.update_weights, and that call is what is timed: abort, prepare, transfer, cache reset
and resume are in it for both. Syncs alternate (ours, verl, ours, verl, ...), the first of each is not counted (planning,
buffers), and the engine's live weights are compared with the actors' after the first and last of each. Printed: medians, the
range, and the ratio.

What limits it: a model that fits two shared cores. Fixed costs (HTTP and Ray calls, about 0.3 s) weigh far more than on real
models, and there is no network between the sides. It is no statement about GPUs, where verl would run `nccl`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import verl_rig  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=7, help="of each kind, the first not counted")
    parser.add_argument("--strategy", default="p2p_tcp")
    parser.add_argument("--bucket", type=int, default=64, help="MiB of verl's bucket")
    words = parser.parse_args()
    verl_rig.prepare()
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        sizes = {"hidden_size": words.hidden, "intermediate_size": 3 * words.hidden, "num_hidden_layers": words.layers}
        sizes |= {"vocab_size": words.vocab, "num_attention_heads": words.hidden // 64, "head_dim": 64}
        model = verl_rig.make_model(Path(folder), dtype="bfloat16", **sizes)
        overrides = verl_rig.cpu_overrides(model, ranks=words.ranks, tp=words.tp, dtype="bfloat16", bucket=words.bucket)
        # The actors hold what the engine serves: verl's engine sends bfloat16 only.
        overrides += ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", f"+weight_sync={words.strategy}"]
        with verl_rig.started(overrides) as rig:
            return compare(rig, words.syncs)


def compare(rig: verl_rig.Rig, syncs: int) -> int:
    managers = {"ours": rig.manager, "verl": theirs(rig)}
    seconds: dict[str, list[float]] = {kind: [] for kind in managers}
    transfer: list[float] = []
    sent = 0
    for step in range(1, 2 * syncs + 1):
        kind = "ours" if step % 2 else "verl"
        use(rig, kind)
        rig.change(step)
        begin = time.perf_counter()
        metrics = managers[kind].update_weights(step)
        seconds[kind].append(time.perf_counter() - begin)
        if kind == "ours":
            transfer.append(metrics["weight_sync/seconds"])
            sent = metrics["weight_sync/bytes"]
        if step <= 2 or step > 2 * syncs - 2:
            check(rig, kind)
    whole = sum(tensor.nbytes for tensor in rig.expected().values())
    counted = {kind: values[1:] for kind, values in seconds.items()}
    print(f"\n{whole / 1e6:.1f} MB of weights; ours wrote {sent / 1e6:.1f} MB; {syncs - 1} syncs of each, alternating")
    for kind, values in counted.items():
        print(f"{kind:5} median {statistics.median(values):7.3f} s   range {min(values):.3f} to {max(values):.3f} s")
    print(f"ours, the session alone (pause to resume): median {statistics.median(transfer[1:]):.3f} s")
    ratio = statistics.median(counted["verl"]) / statistics.median(counted["ours"])
    print(f"verl / ours = {ratio:.2f}   first sync: ours {seconds['ours'][0]:.2f} s, verl {seconds['verl'][0]:.2f} s")
    return 0


def theirs(rig: verl_rig.Rig) -> Any:
    """A second manager over the same workers, with verl's own backend."""
    import dataclasses

    import ray
    from verl.checkpoint_engine import CheckpointEngineManager

    ray.get([worker.__ray_call__.remote(_both, rig.bucket) for worker in workers(rig)])
    config = dataclasses.replace(rig.manager.config, backend="mooncake")
    return CheckpointEngineManager(config=config, actor_wg=rig.actors, replicas=rig.servers.get_replicas())


def workers(rig: verl_rig.Rig) -> list[Any]:
    return [*rig.actors.workers, *(worker for replica in rig.manager.replicas for worker in replica.workers)]


def use(rig: verl_rig.Rig, kind: str) -> None:
    import ray

    ray.get([worker.__ray_call__.remote(_use, kind) for worker in workers(rig)])


def _both(worker: Any, bucket: int) -> None:
    """Give a worker an engine of each kind, as verl makes them."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    role = verl_rig.role_of(worker)
    ours = role.checkpoint_engine
    master = {} if ours._is_master is None else {"is_master": ours._is_master}
    theirs = CheckpointEngineRegistry.new("mooncake", bucket_size=bucket, device="cpu", **master)
    role.engines = {"ours": ours, "verl": theirs}


def _use(worker: Any, kind: str) -> None:
    role = verl_rig.role_of(worker)
    role.checkpoint_engine = role.engines[kind]


def check(rig: verl_rig.Rig, kind: str) -> None:
    """Ends the run unless the engine holds what the actors hold: norms, a tensor cut by columns, one fused and cut by rows."""
    import torch

    live, expected = rig.live(), rig.expected()
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        if not torch.equal(live[0][name], expected[name]):
            raise SystemExit(f"after a sync of {kind}, {name} is not what the actors hold")
    down = [part[name] for part in live for name in part if name.endswith("layers.0.mlp.down_proj.weight")]
    if not torch.equal(torch.cat(down, dim=1), expected["model.layers.0.mlp.down_proj.weight"]):
        raise SystemExit(f"after a sync of {kind}, a down_proj is not what the actors hold")
    queries = [part["model.layers.0.self_attn.qkv_proj.weight"] for part in live]
    rows = expected["model.layers.0.self_attn.q_proj.weight"].shape[0] // len(live)
    if not torch.equal(torch.cat([part[:rows] for part in queries]), expected["model.layers.0.self_attn.q_proj.weight"]):
        raise SystemExit(f"after a sync of {kind}, a q_proj is not what the actors hold")


if __name__ == "__main__":
    sys.exit(main())
