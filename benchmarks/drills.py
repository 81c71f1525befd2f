"""Drills on real servers over a real transport: processes stopped and killed in every phase of a sync, and a long run.

    python -m benchmarks.drills matrix [kind=vllm] [transport=tcp] [engines=2] [tp=1] [only=worker,KILL] [output=FILE.json]
    python -m benchmarks.drills soak [syncs=100] [engines=3] ...

Runs in the core environment; servers run in theirs. One line for each cell, then a table in Markdown (see docs/drills.md).
What an engine holds is read by the kernel out of its workers' memory, and compared with what the trainer's step must be.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.drill_job import Job
from weight_sync.errors import WeightSyncError

VICTIMS = ("trainer", "worker", "controller")
SIGNALS = ("KILL", "STOP")
PHASES = ("plan", "pause", "write", "verify", "commit", "resume")
"""As a sync observer sees them; "plan" is connecting."""

DELAY = {"write": 0.03}
"""Seconds into the phase, where it is not its beginning: in the middle of the bytes."""

STUCK = 60.0
"""A controller that has said nothing for this long is hung; its own deadlines are far shorter."""


@dataclass
class Row:
    """One cell. error: what the sync raised, "" if it committed. engines: how each stood afterwards. version: committed then.

    healed: what was done before the next sync; after: its seconds with everything that came before, and how often it was tried.
    wrong: what must not be; empty is a pass.
    """

    victim: str
    signal: str
    phase: str
    error: str = ""
    seconds: float = 0.0
    engines: dict[str, str] = field(default_factory=dict)
    version: int = -1
    healed: str = ""
    after: float = 0.0
    tries: int = 0
    wrong: list[str] = field(default_factory=list)

    def text(self) -> str:
        ends = "; ".join(self.wrong) or "ok"
        stood = ", ".join(f"{name} {how}" for name, how in self.engines.items())
        return (
            f"{self.victim:10} {self.signal:4} {self.phase:6} {self.seconds:5.1f} s: {self.error or 'committed'} | {stood} | "
            f"{self.healed} {self.after:.1f} s in {self.tries} | {ends}"
        )


class Matrix:
    """Drills one job. Every cell begins with all engines serving one version and ends with all serving a newer one."""

    def __init__(self, job: Job, stopped: float = 4.0) -> None:
        """stopped: seconds without a word after which a controller counts as stopped. A version is the step of its number."""
        self.job, self.stopped = job, stopped
        self.version = 0

    def begin(self) -> None:
        reply = self.next()
        if not reply["ok"] or (wrong := self.all_serve(self.version)):
            raise SystemExit(f"the first sync failed: {reply['error'] or wrong}")

    def next(self) -> dict[str, Any]:
        self.version += 1
        self.job.step(self.version)
        return self.job.ask("sync", version=self.version)

    def cell(self, victim: str, sign: str, phase: str) -> Row:
        job, row = self.job, Row(victim, sign, phase)
        before, number = self.version, getattr(signal, f"SIG{sign}")
        if phase == "plan":
            self._new_controller(row)  # one that has not connected yet
        row.wrong.clear()
        self.version += 1
        job.step(self.version)
        pid = {"trainer": job.trainers[-1].pid, "worker": job.servers["e0"].workers[-1], "controller": 0}[victim]
        began = time.monotonic()
        kill = {"phase": phase, "pid": pid, "signal": int(number), "delay": DELAY.get(phase, 0.0)}
        old = job.controller
        try:
            reply = job.ask("sync", STUCK if victim != "controller" else self.stopped, version=self.version, kill=kill)
            row.error, row.version = short(reply["error"]), reply["version"]
        except EOFError:
            reply, row.error = None, "controller killed"
        except TimeoutError:
            reply, row.error = None, "controller stopped"
        row.seconds = time.monotonic() - began
        if reply is None and victim != "controller":
            row.wrong.append(f"the controller did not answer within {STUCK:g} s")
            return row
        if victim == "controller" and reply is not None:
            row.wrong.append("the controller was not hit")
        self._look(row, before, victim, sign)
        began = time.monotonic()
        self._heal(row, victim, sign, pid, before)
        self._sync_again(row)
        row.after = time.monotonic() - began
        if victim == "controller" and sign == "STOP":
            self._wake(row, old)
        row.wrong += self.all_serve(self.version)
        return row

    def _look(self, row: Row, before: int, victim: str, sign: str) -> None:
        """How every engine stands, and that what serves holds the bytes of the version it stamps."""
        for name in self.job.servers:
            hit = victim == "worker" and name == "e0"
            seen = self.job.stands(name, 3.0 if hit else 10.0)
            if not seen["answers"]:
                row.engines[name] = f"{seen['text']}"
                if not hit:
                    row.wrong.append(f"{name}, which nobody hit, does not answer: {seen['text']}")
            elif seen["paused"]:
                row.engines[name] = f"paused, {self._bytes(name, before)}"
            else:
                row.engines[name] = f"serves {self._named(seen['version'], before)}"
                row.wrong += self.job.wrong(name, seen["version"])
                if seen["version"] not in (before, before + 1):
                    row.wrong.append(f"{name} serves version {seen['version']}")

    def _bytes(self, name: str, before: int) -> str:
        """Whose bytes an engine holds that serves nothing."""
        old, new = self.job.wrong(name, before), self.job.wrong(name, before + 1)
        return "all bytes old" if not old else "all bytes new" if not new else "bytes of both"

    def _named(self, version: int | None, before: int) -> str:
        return {before: "old", before + 1: "new"}.get(version or 0, str(version))

    def _heal(self, row: Row, victim: str, sign: str, pid: int, before: int) -> None:
        job = self.job
        if victim == "controller":
            self._new_controller(row)
        elif victim == "trainer" and sign == "KILL":
            job.restart_trainer(len(job.trainers) - 1)
            row.healed = "rank restarted"
        elif victim == "worker" and sign == "KILL":
            job.end(job.servers["e0"])
            engine = job.start_engine("e0")
            reply = job.ask("replace", name="e0", engine=engine.about, gone=True, pull=False)
            row.healed = "engine replaced"
            if not reply["ok"]:
                row.wrong.append(f"replace: {reply['error']}")
        else:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
            row.healed = "continued"
            if victim == "worker":  # what it does once it can again
                seen = job.stands("e0", 20.0)
                row.engines["e0"] += " then " + (
                    seen["text"] if not seen["answers"] else
                    f"paused, {self._bytes('e0', before)}" if seen["paused"] else
                    f"serves {self._named(seen['version'], before)}"
                )  # fmt: skip
                if seen["version"] is not None:
                    row.wrong += job.wrong("e0", seen["version"])

    def _new_controller(self, row: Row) -> None:
        """Another process takes over; the old one, if it lives, is left as it is."""
        if row.error == "":
            self.job.controller.kill()
        self.job.start_controller(list(self.job.servers))
        reply = self.job.ask("recover")
        found = reply.get("recovery", {})
        row.healed = f"recover: {found.get('action', reply['error'])}"
        row.version = reply["version"]
        if not reply["ok"]:
            row.wrong.append(f"recover: {reply['error']}")
            return
        if found["action"] in ("resumed", "serving"):
            for name in self.job.servers:
                row.wrong += self.job.wrong(name, found["version"])

    def _sync_again(self, row: Row) -> None:
        """The next sync, of a new step; tried again only for errors, and every try is counted."""
        end, error = time.monotonic() + 200.0, ""
        while time.monotonic() < end:
            row.tries += 1
            reply = self.job.ask("connect")  # puts the fence up first, so that the trainer may step
            if reply["ok"]:
                self.version += 1
                try:
                    self.job.step(self.version)
                except WeightSyncError as held:
                    row.wrong.append(f"the trainer is still held after connect(): {held}")
                    return
                reply = self.job.ask("sync", version=self.version)
            if reply["ok"]:
                return
            error = reply["error"]
            time.sleep(1.0)
        row.wrong.append(f"no sync within 200 s: {error}")

    def _wake(self, row: Row, old: Any) -> None:
        """The stopped controller goes on: it must be refused, whatever it was about to do."""
        os.kill(old.pid, signal.SIGCONT)
        try:
            reply = old.reply(120.0)
        except (EOFError, TimeoutError) as error:
            row.wrong.append(f"the old controller, continued: {error}")
            return
        row.healed += f"; woken: {short(reply['error']) or 'committed'}"
        if reply["ok"]:
            row.wrong.append(f"the old controller, continued, says that version {reply['version']} is committed")
        old.kill()

    def all_serve(self, version: int) -> list[str]:
        wrong: list[str] = []
        for name in self.job.servers:
            wrong += self.job.wrong(name, version)
            seen = self.job.stands(name)
            if seen["version"] != version:
                wrong.append(f"{name} should serve version {version}: {seen}")
        return wrong


def short(error: str) -> str:
    """The first words of an error, for a table."""
    return error.splitlines()[0][:110] if error else ""


def cells(only: str) -> Iterator[tuple[str, str, str]]:
    """All, or those that hold every word of one of the alternatives: "worker,KILL;trainer,STOP,write"."""
    chosen = [alternative.split(",") for alternative in only.split(";")] if only else []
    for victim in VICTIMS:
        for sign in SIGNALS:
            for phase in PHASES:
                if not chosen or any(set(words) <= {victim, sign, phase} for words in chosen):
                    yield victim, sign, phase


def matrix(job: Job, only: str = "") -> list[Row]:
    drill, rows = Matrix(job), []
    drill.begin()
    for victim, sign, phase in cells(only):
        rows.append(drill.cell(victim, sign, phase))
        print(rows[-1].text(), flush=True)
    return rows


def table(rows: list[Row]) -> str:
    lines = ["| hit | signal | phase | the sync says | engines then | committed | next sync | seconds |", "|" + "---|" * 8]
    for row in rows:
        stood = ", ".join(f"{name} {how}" for name, how in row.engines.items())
        ends = row.healed + ("" if not row.wrong else "; **" + "; ".join(row.wrong) + "**")
        error = (row.error or "committed").replace("|", "/")
        lines.append(
            f"| {row.victim} | {row.signal} | {row.phase} | {error} | {stood} | {row.version} | {ends} | {row.after:.1f} |"
        )
    return "\n".join(lines)


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers lead process groups of their own and must be ended
    what, options = words[0], dict(word.split("=", 1) for word in words[1:])
    folder = Path(tempfile.mkdtemp(prefix="weight-sync-drills-"))
    output, only = options.pop("output", ""), options.pop("only", "")
    syncs = int(options.pop("syncs", "100"))
    numbers = {key: int(options.pop(key)) for key in ("engines", "tp", "ranks") if key in options}
    numbers.setdefault("engines", 3 if what == "soak" else 2)
    if unknown := set(options) - {"kind", "transport"}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}")
    print(f"logs in {folder}", flush=True)
    with Job(options.get("kind", "vllm"), folder, transport=options.get("transport", "tcp"), **numbers) as job:
        print(f"started in {job.start_seconds:.0f} s", flush=True)
        if what == "soak":
            from benchmarks.drill_soak import soak

            result = soak(job, syncs)
            print(result.text())
            wrong, found = result.wrong, asdict(result)
        elif what == "matrix":
            rows = matrix(job, only)
            print(table(rows))
            wrong, found = [row.text() for row in rows if row.wrong], [asdict(row) for row in rows]
        else:
            raise SystemExit(f"{what}: there are matrix and soak")
    if output:
        Path(output).write_text(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
