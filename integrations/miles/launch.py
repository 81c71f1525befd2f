"""python train.py trainer=miles +weight_sync=NAME: miles's command line printed, checked by its parser, its script started."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from weight_sync.config import check_job
from weight_sync.errors import ConfigError, listed
from weight_sync.schema import JobConf
from weight_sync_integrations.miles.render import MODEL_TOOLS, Command, render, shell

_SECONDS = 300.0
"""For miles's parser and model definitions: importing Megatron and SGLang takes a while on a cold disk."""


def run(job: JobConf) -> int:
    """Returns the exit code of miles's train script; 0 where nothing was to be started.

    Raises ConfigError for what is known to be wrong before anything is started.
    """
    check_job(job)
    folder = Path(job.output_dir).absolute() / "miles"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "weight_sync.yaml"
    command = render(job, file)
    file.write_text(
        "# Written by train.py; read by miles through --custom-config-path.\n" + yaml.safe_dump(dict(command.block))
    )
    print(shell(job, command), flush=True)
    model = model_words(job)
    print(checked(job, [*model, *command.words]), flush=True)
    if not _starts(job):
        why = "miles.dry_run is set" if job.miles.dry_run else "miles.script=PATH/train.py starts it"
        print(f"nothing was started: {why}", flush=True)
        return 0
    return _start(job, command, model)


def checked(job: JobConf, words: list[str]) -> str:
    """One line on what miles's parser says. Raises ConfigError for words that it does not take."""
    interpreter = [job.trainer.python, "-m", "weight_sync_integrations.miles.parser"]
    try:
        done = subprocess.run(
            interpreter, input=json.dumps(words), capture_output=True, text=True, timeout=_SECONDS, env=_environment(job)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"trainer.python={job.trainer.python}: {error}") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        why = f"asking miles's parser ended with code {done.returncode}: {done.stderr.strip()[-600:]}"
        answer = {"absent": why}
    if "absent" in answer:
        if _starts(job) and job.miles.ray_job is None:
            raise ConfigError(f"trainer.python={job.trainer.python} cannot import miles: {answer['absent']}")
        return f"not checked by miles's parser: {job.trainer.python} cannot import miles ({answer['absent']})"
    if answer["problems"]:
        raise ConfigError(f"miles ({answer['miles']}) does not take this command line: {listed(answer['problems'])}")
    return f"miles's parser ({answer['miles']}) takes it"


def model_words(job: JobConf) -> list[str]:
    """The model's own flags, by miles's definition of that name; none without a checkout or a name."""
    name, script = job.miles.model, job.miles.script
    if name is None or script is None:
        return []
    root = Path(script).resolve().parent
    program, shell_file = root / MODEL_TOOLS[0], root / MODEL_TOOLS[1].format(name=name)
    if program.is_file():
        words = [job.trainer.python, str(program), name]
    elif shell_file.is_file():
        words = ["bash", "-c", f'source {shlex.quote(str(shell_file))} && printf "%s " "${{MODEL_ARGS[@]}}"']
    else:
        raise ConfigError(f"miles.model={name}: {root} has neither {program.name} nor {shell_file.relative_to(root)}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, env=_environment(job))
    if done.returncode:
        raise ConfigError(f"miles.model={name}: {shlex.join(words)} ended with code {done.returncode}: {done.stderr[-600:]}")
    return shlex.split(done.stdout)


def _starts(job: JobConf) -> bool:
    return job.miles.script is not None and not job.miles.dry_run


def _start(job: JobConf, command: Command, model: list[str]) -> int:
    script = Path(str(job.miles.script)).resolve()
    if not script.is_file():
        raise ConfigError(f"miles.script={job.miles.script}: no such file; give train.py of a miles checkout")
    words = [job.trainer.python, str(script), *model, *command.words]
    if job.miles.ray_job is not None:
        runtime = json.dumps({"env_vars": dict(job.miles.environment)})
        ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", job.miles.ray_job]
        return subprocess.run([*ray, "--runtime-env-json", runtime, "--", *words], check=False).returncode
    return subprocess.run(words, env=_environment(job), check=False).returncode


def _environment(job: JobConf) -> dict[str, str]:
    return {**os.environ, **job.miles.environment}
