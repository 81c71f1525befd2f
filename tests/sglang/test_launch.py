"""Command line, environment and refusals of the launcher. Servers that really start are in test_server.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weight_sync.errors import ConfigError, DeadlineExceeded, ParallelError, RolloutError
from weight_sync.ids import Deadline
from weight_sync_integrations.server import free_port
from weight_sync_integrations.sglang import launch
from weight_sync_integrations.sglang.launch import CPU_SITE, ServerSpec, command, environment, new_token, start

Make = Callable[..., Path]


def spec(folder: Path, **values: Any) -> ServerSpec:
    defaults = {"model": str(folder), "token": "top-secret", "max_total_tokens": 64}
    return ServerSpec(**{**defaults, **values})


def test_the_token_reaches_the_server_by_environment_and_never_by_arguments(checkpoint: Make, tmp_path: Path) -> None:
    made = spec(checkpoint("qwen3"), transport={"name": "mooncake", "protocol": "tcp"})

    variables = environment(made, str(tmp_path))

    assert not any("top-secret" in word for word in command(made, 1234))
    assert variables["WEIGHT_SYNC_TOKEN"] == "top-secret"
    assert variables["WEIGHT_SYNC_TRANSPORT"] == '{"name": "mooncake", "protocol": "tcp"}'
    assert variables["WEIGHT_SYNC_RENDEZVOUS"] == str(tmp_path)
    assert new_token() != new_token()


def test_only_cpu_servers_get_the_stand_ins_and_every_rank_gets_cores(checkpoint: Make) -> None:
    cpu = environment(spec(checkpoint("qwen3"), tp=3, cpus=(4, 5, 6, 7)), "folder")
    gpu = environment(spec(checkpoint("qwen3"), device="cuda"), "folder")

    assert cpu["PYTHONPATH"].split(os.pathsep)[0] == str(CPU_SITE)
    assert cpu["SGLANG_CPU_OMP_THREADS_BIND"] == "4,7|5|6"
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"} & set(gpu)
    shared = environment(spec(checkpoint("qwen3"), tp=2, pp=2, cpus=(0, 1)), "folder")
    assert shared["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|0|1"


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"token": ""}, ConfigError, "token"),
        ({"device": "tpu"}, ConfigError, "cpu or cuda"),
        ({"model": "/nowhere"}, ConfigError, "no config.json"),
        ({"max_total_tokens": None}, ConfigError, "max_total_tokens"),
        ({"tp": 4, "ep": 3}, ParallelError, r"ep=3 does not divide tp=4; legal: \[1, 2, 4\]"),
        ({"tp": 2, "attn_dp": 4}, ParallelError, r"attn_dp=4 does not divide tp=2"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_before_anything_starts(
    checkpoint: Make, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        spec(checkpoint("qwen3"), **values)


def test_a_port_is_taken_where_the_kernel_hands_out_none_by_itself() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 10
    assert max(ports) < lowest


def _server(folder: Path, script: str) -> str:
    """An interpreter that ignores SGLang's arguments and runs `script` with the port in `port`."""
    file = folder / "python"
    body = f"import os, sys\nport = int(sys.argv[sys.argv.index('--port') + 1])\n{script}\n"
    file.write_text(f"#!{sys.executable}\n{body}")
    file.chmod(0o755)
    return str(file)


def test_a_server_that_dies_is_one_error_with_the_end_of_its_log(checkpoint: Make, tmp_path: Path) -> None:
    python = _server(tmp_path, "print('no GPU here'); sys.exit(3)")
    with pytest.raises(RolloutError, match=r"(?s)exit code 3.*no GPU here"):
        start(spec(checkpoint("qwen3"), python=python, log=str(tmp_path / "log")), Deadline.after(30))


def test_a_server_whose_workers_stay_silent_is_reported_and_stopped(checkpoint: Make, tmp_path: Path) -> None:
    script = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
open(os.environ["WEIGHT_SYNC_RENDEZVOUS"] + "/rank-00001.json", "w").write('{"rank": 1, "host": "h", "port": 1}')
open("PIDFILE", "w").write(str(os.getpid()))
HTTPServer(("127.0.0.1", port), Health).serve_forever()
""".replace("PIDFILE", str(tmp_path / "pid"))
    made = spec(checkpoint("qwen3"), tp=2, python=_server(tmp_path, script), log=str(tmp_path / "log"))
    with pytest.raises(DeadlineExceeded, match=r"of its 2 workers only \[1\] announced"):
        start(made, Deadline.after(6))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_without_a_token_the_plugin_does_nothing_at_all() -> None:
    code = (
        "import sys; from weight_sync_integrations.sglang.plugin import activate; activate(); "
        "print([m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')])"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHT_SYNC")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_launching_needs_neither_torch_nor_sglang() -> None:
    code = (
        f"import sys; import {launch.__name__}; import weight_sync_integrations.sglang.engine; "
        "print([m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_stand_in_can_be_imported_and_names_itself_when_called() -> None:
    code = (
        "import sgl_kernel, torchvision; from sgl_kernel.elementwise import rmsnorm\n"
        "try: rmsnorm(1)\nexcept NotImplementedError as error: print(error)\n"
        "try: import sgl_kernel.scalar_type\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **launch.cpu_environment()}, capture_output=True, text=True
    )
    assert "sgl_kernel.elementwise.rmsnorm is a stand-in for CPU" in done.stdout, done.stderr
    assert "No module named 'sgl_kernel.scalar_type'" in done.stdout
