"""Where we hook into verl: the installed one has all of it, and one that lacks any of it is refused before anything starts."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verl

from benchmarks.verl_rig import compose_config
from weight_sync.errors import ConfigError
from weight_sync_integrations.verl import seams
from weight_sync_integrations.verl.check import check

INSTALLED = Path(verl.__file__).parent
ALL = ("vllm", "sglang", "fsdp", "fsdp2", "megatron")


def copied(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """The files of verl that are looked at, with pieces of text replaced: (file, old, new)."""
    for file in {seam.file for seam in seams.SEAMS} | {"version/version"}:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / file, folder / file)
    for file, old, new in changes:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    return folder


def test_the_installed_verl_has_every_place_that_is_hooked_into() -> None:
    assert verl.__version__ == seams.WRITTEN_FOR
    assert list(seams.differing(INSTALLED, ALL)) == []


@pytest.mark.parametrize("seam", [seam for seam in seams.SEAMS if seam.name], ids=str)
def test_a_function_that_has_another_name_is_named(seam: seams.Seam, tmp_path: Path) -> None:
    tree = ast.parse((INSTALLED / seam.file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == seam.name:
            node.name = "renamed"
    place = copied(tmp_path)
    (place / seam.file).write_text(ast.unparse(tree))
    assert f"{seam}: is gone ({seam.why})" in list(seams.differing(place, ALL))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            (seams._VLLM, "self.servers[0].resume_engine_generation.remote()", "self.servers[0].resume_generation.remote()"),
            r"vLLMReplica.resume_generation: does not use resume_engine_generation",
        ),
        (
            (seams._BASE, "await self.abort_replicas()", "await self.resume_generation_replicas()"),
            r"CheckpointEngineManager.update_weights: does not use abort_replicas",
        ),
        ((seams._BASE, '["finalize"]', '["finish"]'), r"CheckpointEngineManager.update_weights: does not use finalize"),
        (
            (seams._BASE, "self.build_process_group(rollout)", "self.build_process_group(await self.resume_all())"),
            "",  # what it does beside is verl's affair
        ),
        ((seams._WORKERS, "method: str, *args", "name: str, *args"), r"execute_checkpoint_engine: does not take method"),
        (("workers/config/rollout.py", "custom_backend_module:", "backend_module:"), r"does not use custom_backend_module"),
    ],
)
def test_what_is_called_otherwise_is_named_with_what_it_was_for(
    change: tuple[str, str, str], says: str, tmp_path: Path
) -> None:
    place = copied(tmp_path, change)
    if not says:
        assert list(seams.differing(place, ALL)) == []
        return
    with pytest.raises(ConfigError, match=rf"verl 0\.9\.1 in .* differs from verl 0\.9\.1.*{says}.*Install verl 0\.9\.1"):
        seams.require("vllm", "fsdp2", place)


def test_a_resume_before_finalize_is_an_order_that_nothing_of_ours_survives(tmp_path: Path) -> None:
    last = "        # 8. resume all unfinished requests for partial rollout\n        await self.resume_generation_replicas()\n"
    early = "        # 5. update weights of all workers\n"
    place = copied(tmp_path, (seams._BASE, last, ""), (seams._BASE, early, last + early))
    (found,) = seams.differing(place, ALL)
    assert "update_weights, finalize, resume_generation_replicas in this order" in found


def test_only_the_rollout_and_the_actors_in_use_matter(tmp_path: Path) -> None:
    place = copied(tmp_path, (seams._VLLM, "resume_engine_generation", "resume_now"))
    seams.require("sglang", "megatron", place)
    with pytest.raises(ConfigError, match=r"vLLMHttpServer\.resume_engine_generation: is gone \(refused while"):
        seams.require("vllm", "megatron", place)


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_said_by_the_check_of_a_job_that_asks_for_us_and_by_no_other(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a-cluster:6379")
    place = copied(tmp_path, (seams._WORKERS, "def update_weights", "def sync_weights"))
    installed: Callable[[], Any] = lambda: place  # noqa: E731
    monkeypatch.setattr(seams, "_installed", installed)
    overrides = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.name=vllm"]
    overrides += ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    config = compose_config([*overrides, *(["+weight_sync=p2p_tcp"] if asked else [])])
    if not asked:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"ActorRolloutRefWorker\.update_weights: is gone \(hands over the training engine\)"):
        check(config)
