"""Many vLLM servers of one machine, each a fork of one process that has imported vLLM: ready in seconds instead of a minute.

Runs in vLLM's environment. What is forked is vLLM's own `vllm.entrypoints.openai.api_server`, run as a main module with the
command line and environment that weight_sync_integrations.vllm.launch makes; its engine core and workers are forked too
(vLLM insists on spawn on a CPU, which would import everything again in each of them).

Standard input, one JSON a line: {"words": arguments, "environment": {...}, "log": file} -> the server's pid on standard
output; {"checkpoint": folder, "kind", "sizes"} -> the folder. Every server leads a process group of its own; the caller ends
them. At the end of its input this process ends, its servers do not.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys

PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
)


def serve(words: list[str], environment: dict[str, str], log: str) -> None:
    """In the fork: become the server. Does not return."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    silent = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((silent, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(environment)
    sys.argv = ["vllm.entrypoints.openai.api_server", *words]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def fork_children() -> None:
    """Let vLLM fork its engine core and its workers."""
    for name in ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.utils"):
        importlib.import_module(name).get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]


def main() -> None:
    import torch

    torch.set_num_threads(1)  # no thread but this one may exist when it forks
    for name in PRELOADED:
        importlib.import_module(name)
    fork_children()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; forked servers restore it, they wait for their children
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "checkpoint" in asked:
            from weight_sync_integrations.checkpoints import make_checkpoint

            print(json.dumps(str(make_checkpoint(asked["checkpoint"], asked["kind"], **asked["sizes"]))), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                serve(asked["words"], asked["environment"], asked["log"])
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(json.dumps(pid), flush=True)


if __name__ == "__main__":
    main()
