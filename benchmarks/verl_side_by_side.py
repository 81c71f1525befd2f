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
from benchmarks.verl_inside import role_of  # noqa: E402


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
    records: list[dict[str, Any]] = []
    for step in range(1, 2 * syncs + 1):
        kind = "ours" if step % 2 else "verl"
        use(rig, kind)
        rig.change(step)
        begin = time.perf_counter()
        metrics = managers[kind].update_weights(step)
        seconds[kind].append(time.perf_counter() - begin)
        if kind == "ours":
            records.append(metrics)
        if step <= 2 or step > 2 * syncs - 2:
            check(rig, kind)
    whole = sum(tensor.nbytes for tensor in rig.expected().values())
    counted, sent = {kind: values[1:] for kind, values in seconds.items()}, records[-1]["weight_sync/bytes"]
    print(f"\n{whole / 1e6:.1f} MB of weights; ours wrote {sent / 1e6:.1f} MB; {syncs - 1} syncs of each, alternating")
    for kind, values in counted.items():
        print(f"{kind:5} median {statistics.median(values):7.3f} s   range {min(values):.3f} to {max(values):.3f} s")
    print(where(records[1:], statistics.median(counted["ours"])))
    ratio = statistics.median(counted["verl"]) / statistics.median(counted["ours"])
    print(f"verl / ours = {ratio:.2f}   first sync: ours {seconds['ours'][0]:.2f} s, verl {seconds['verl'][0]:.2f} s")
    return 0


def where(records: list[dict[str, Any]], whole: float) -> str:
    """Where a call of ours spends its time: medians by phase, and what verl does around the session."""
    prefix = "weight_sync/seconds/"
    phases = {
        key.removeprefix(prefix): statistics.median(r[key] for r in records) for key in records[0] if key.startswith(prefix)
    }
    session = statistics.median(record["weight_sync/seconds"] for record in records)
    largest = sorted(phases.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {seconds:.3f}" for name, seconds in largest if seconds >= 0.005)
    return (
        f"ours, medians in s: session {session:.3f} ({shown}), verl's abort, prepare and resume around it {whole - session:.3f}"
    )


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

    role = role_of(worker)
    ours = role.checkpoint_engine
    master = {} if ours._is_master is None else {"is_master": ours._is_master}
    theirs = CheckpointEngineRegistry.new("mooncake", bucket_size=bucket, device="cpu", **master)
    role.engines = {"ours": ours, "verl": theirs}


def _use(worker: Any, kind: str) -> None:
    role = role_of(worker)
    role.checkpoint_engine = role.engines[kind]


def check(rig: verl_rig.Rig, kind: str) -> None:
    """Ends the run unless every tensor of every worker is, bit for bit, what the actors hold."""
    if found := rig.differing():
        raise SystemExit(f"after a sync of {kind}, {len(found)} tensors are not what the actors hold: {', '.join(found[:4])}")


if __name__ == "__main__":
    sys.exit(main())
