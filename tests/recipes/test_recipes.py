"""Every shipped recipe composes, is legal, is planned with its proof, and stands in docs/recipes.md with today's numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weight_sync.config import compose_job, hf_config, model_configs, recipes
from weight_sync.errors import ConfigError

ROOT = Path(__file__).parents[2]
NAMES = {
    "qwen3_4b_h100x8", "qwen3_30b_a3b_h100x32", "qwen3_235b_a22b_h100x128", "glm45_air_h100x64", "glm47_flash_h100x16",
    "glm5_744b_h100x256", "kimi_k2_h100x512", "deepseek_v3_671b_h100x96",
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """docs/recipes.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_recipes", ROOT / "docs" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_recipe_of_the_list_is_shipped_and_no_other_is_undocumented() -> None:
    assert set(recipes()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_is_planned_with_proof_and_the_page_has_its_numbers(name: str, made: ModuleType) -> None:
    row = made.row_of(name)

    lines = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    stale = [line for line in (row.moves, row.times, row.note) if line not in lines]
    assert not stale, "run: make docs"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_takes_as_many_gpus_as_its_name_says(name: str) -> None:
    job = compose_job([f"+recipes={name}"])

    assert job.trainer.ranks + job.rollout.engines * job.rollout.tp * job.rollout.pp == int(name.rpartition("x")[2])
    assert job.rollout.device == "cuda"
    assert job.weight_sync.strategy == "p2p_rdma"
    assert job.model.config in model_configs()


def test_the_page_holds_nothing_but_what_its_rows_say() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^\| (\w+_h100x\d+) \|", page, re.M)) == NAMES


def test_a_recipe_is_overridden_behind_it_and_another_strategy_is_chosen_without_a_plus() -> None:
    job = compose_job(["+recipes=qwen3_4b_h100x8", "weight_sync=p2p_tcp", "rollout.engines=1"])
    assert (job.weight_sync.strategy, job.rollout.engines) == ("p2p_tcp", 1)
    with pytest.raises(ConfigError, match="the recipe has chosen a strategy; another one is chosen without a plus"):
        compose_job(["+recipes=qwen3_4b_h100x8", "+weight_sync=p2p_tcp"])


def test_an_unknown_recipe_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Could not find 'recipes/nosuch'.*kimi_k2_h100x512"):
        compose_job(["+recipes=nosuch"])


def test_a_recipe_without_a_checkpoint_is_not_run_with_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from weight_sync_integrations.job import run

    with pytest.raises(ConfigError, match=r"model.config=qwen3_4b is enough to plan; to run, give model.path=DIR"):
        run(compose_job(["+recipes=qwen3_4b_h100x8"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.config=nosuch", "model.config=nosuch: no such file or folder; shipped are .*kimi_k2"),
        ("model.config={folder}", "model.config=.*: no config.json there"),
        ("model.config={folder}/bad.json", "not JSON"),
        ("model.config={folder}/list.json", "must hold an object, not list"),
    ],
)
def test_a_model_config_that_cannot_be_read_is_refused_by_key(tmp_path: Path, override: str, said: str) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=said):
        hf_config(compose_job([override.format(folder=tmp_path)]))


def test_a_model_config_may_be_a_file_or_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    for value in (tmp_path, tmp_path / "config.json"):
        assert hf_config(compose_job([f"model.config={value}"])) == {"architectures": ["X"]}
