"""trainer=miles: recipes as miles's command line, compared with its published examples by its own parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import miles_support as support
import pytest
import yaml

from weight_sync.config import compose_job
from weight_sync.errors import ConfigError
from weight_sync_integrations.miles import launch
from weight_sync_integrations.miles.job import block_of, check_marker
from weight_sync_integrations.miles.render import HOOK, render, shell

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
RECIPES = [name for name in PUBLISHED if name != "source"]
OURS = {"custom_megatron_init_path", "custom_config_path"}
CHECKPOINT = "models/any"
PUBLISHED_HOME = "HOME"


def rendered(*overrides: str) -> Any:
    """Recipes have the examples' places below the user's home. Only here it is theirs: what is started writes into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", PUBLISHED_HOME)
        return render(compose_job(["trainer=miles", *overrides]), Path("block.yaml"))


WORDS = {
    "good": ["--num-rollout", "3", "--update-weight-transfer-mode", "p2p"],
    "type": ["--num-rollout", "three"],
    "choice": ["--update-weight-transfer-mode", "pigeon"],
    "unknown": ["--no-such-flag-of-miles", "1"],
    "short": ["--num-rollou", "3"],
}


@pytest.fixture(scope="module")
def asked(folder: Path) -> dict[str, dict[str, Any]]:
    """What miles's parser (0.0.2, with its own Megatron and SGLang) says, in one process, for importing it takes long.

    compare: what it makes differently of ours and of theirs, by recipe; both with the flags of the model's definition as the
    example has them, without those that 0.0.2 does not have yet. problems: of WORDS.
    """
    pairs = {}
    for name in RECIPES:
        model, theirs = (PUBLISHED[name][key].split() for key in ("model_flags", "flags"))
        pairs[name] = [_known([*model, *rendered(f"+recipes={name}").words]), _known([*model, *theirs])]
    words = {case: ["--rollout-batch-size", "8", *words] for case, words in WORDS.items()}  # miles wants this one
    return support.parse({"compare": pairs, "problems": words}, folder / "asked.json")


NEWER = {"--original-max-position-embeddings": 1, "--beta-fast": 1, "--beta-slow": 1}
"""Flags that miles-rl 0.0.2 does not know, and how many words follow; all in Kimi-K2's model definition of the main branch."""


def _known(words: list[str]) -> list[str]:
    """Without the flags of NEWER."""
    found, skip = list[str](), 0
    for word in words:
        if word in NEWER:
            skip = NEWER[word] + 1
        if skip:
            skip -= 1
        else:
            found.append(word)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_means_to_miles_parser_what_the_published_example_means(name: str, asked: dict[str, Any]) -> None:
    found = asked["compare"][name]
    assert set(found) == OURS, found
    assert compose_job([f"+recipes={name}", "trainer=miles"]).miles.model == PUBLISHED[name]["model"]
    assert not set(NEWER) & {*rendered(f"+recipes={name}").words, *PUBLISHED[name]["flags"].split()}
    environment = compose_job([f"+recipes={name}", "trainer=miles"]).miles.environment
    assert environment == PUBLISHED[name]["environment"]


@pytest.mark.timeout(300)
def test_a_wrong_type_an_unknown_flag_an_abbreviation_and_a_bad_choice_are_each_found_by_miles_parser(asked: Any) -> None:
    found = asked["problems"]
    assert found["good"] == []
    for case, word in {"type": "num-rollout", "choice": "pigeon", "unknown": "no-such-flag", "short": "--num-rollou"}.items():
        assert word in found[case][0]


def test_the_block_that_is_written_is_the_block_that_is_read_and_engines_get_the_marker() -> None:
    job = compose_job(["trainer=miles", "+weight_sync=p2p_rdma", "weight_sync.verify.level=full"])
    block = yaml.safe_load(yaml.safe_dump(dict(render(job, Path("x")).block)))
    args = type("Args", (), block)()
    assert block_of(args) == job.weight_sync
    check_marker(args)


def test_sizes_are_said_once_and_a_flag_that_says_them_again_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor-model-parallel-size \(it follows from trainer"):
        rendered("+weight_sync=p2p_tcp", "+miles.arguments.tensor-model-parallel-size=4")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout=vllm", "engines are SGLang"),
        ("rollout.pp=2", "rollout.pp=2"),
        ("trainer.order=tp-cp-ep-pp-dp", "order"),
        ("trainer.ranks=12", "do not fill nodes"),
    ],
)
def test_a_job_that_miles_has_no_flags_for_is_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rendered("+weight_sync=p2p_tcp", override)


def test_a_users_checkpoint_takes_the_place_of_the_recipes_and_the_pasted_line_is_one_command() -> None:
    job = compose_job(["+recipes=qwen3_4b_h100x8", "trainer=miles", f"model.path={CHECKPOINT}", "miles.ray_job=http://h:8265"])
    command = render(job, Path("b.yaml"))
    assert command.words[command.words.index("--hf-checkpoint") + 1] == CHECKPOINT
    text = shell(job, command)
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ray job submit --address http://h:8265" in text
    assert HOOK in text


CHECKOUT = {
    "miles/utils/external_utils/model_args_utils.py": "import sys; print('--num-layers 36 --name', sys.argv[1])",
    "train.py": "import json, sys; json.dump(sys.argv, open(sys.argv[-1], 'w')); sys.exit(7)",
}


def checkout(folder: Path) -> list[str]:
    """Something with the files of a miles checkout; overrides that point at it."""
    for name, text in CHECKOUT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [
        "trainer=miles", "+weight_sync=p2p_tcp", f"output_dir={folder}", f"trainer.python={sys.executable}",
        "miles.model=qwen3-4B", f"miles.script={folder / 'train.py'}", f"+miles.arguments.save={folder / 'seen.json'}",
    ]  # fmt: skip


def test_train_py_prints_the_command_and_starts_nothing_with_an_interpreter_that_cannot_import_miles(tmp_path: Path) -> None:
    main = [sys.executable, str(support.ROOT / "train.py"), *checkout(tmp_path)]
    done = subprocess.run(main, capture_output=True, text=True)  # without the stand-ins that miles needs on a CPU
    assert done.returncode == 1
    assert f"--custom-megatron-init-path {HOOK}" in done.stdout
    assert "cannot import miles" in done.stderr
    assert not (support.ROOT / PUBLISHED_HOME).exists()  # SGLang makes its cache below the home as soon as it is imported
    assert not (tmp_path / "seen.json").exists()


def test_a_dry_run_prints_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(launch, "checked", lambda job, words: "not asked here")
    assert launch.run(compose_job([*checkout(tmp_path), "miles.dry_run=true"])) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert not (tmp_path / "seen.json").exists()


def test_the_scripts_exit_code_is_train_pys_and_its_words_are_the_models_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = compose_job(checkout(tmp_path))
    monkeypatch.setattr(launch, "checked", lambda job, words: "not asked here")
    assert launch.run(job) == 7
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen[1:5] == ["--num-layers", "36", "--name", "qwen3-4B"]
    assert seen[seen.index("--custom-config-path") + 1] == os.fspath(tmp_path / "miles" / "weight_sync.yaml")
    assert yaml.safe_load((tmp_path / "miles" / "weight_sync.yaml").read_text())["weight_sync"]["strategy"] == "p2p_tcp"
