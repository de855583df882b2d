"""A chat server as its own process: start it, stop it, kill it, start it again."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any, Self

import psutil

__all__ = ["EXAMPLES", "ChatServer", "until"]

EXAMPLES = Path(__file__).parents[2] / "examples"
START_SECONDS = 60.0


_SCRIPTED = re.compile(
    r"^(?:WARNING|ERROR):chatkeep\.engine:[^\n]*\nTraceback [^\n]*\n(?:[ ][^\n]*\n)*"
    r"[\w.]*ScriptedFailure: [^\n]*\n",
    re.MULTILINE,
)
"""A tool or a model of the scripted scenarios that fails on purpose, as the engine logs it."""


class ChatServer:
    """``examples/scripted_server.py`` on a store, or another command that prints ``ready URL``."""

    def __init__(
        self,
        store: str,
        *options: str,
        command: Sequence[str] | None = None,
        folder: Path | None = None,
    ) -> None:
        script = [sys.executable, str(EXAMPLES / "scripted_server.py"), "--port", "0"]
        self.store = store
        self.calls = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed by close()
        own = ["--store", store, "--calls", self.calls.name, *options]
        self.command = list(command or [*script, *own])
        self.folder = folder
        self.url = ""
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start and wait until it is ready."""
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=self.folder
        )
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        try:
            line = _line(self.process.stdout)
        finally:
            timer.cancel()
        if not line.startswith("ready "):
            code = self.process.wait()
            raise RuntimeError(f"the server did not start (exit code {code}):\n{self.errors()}")
        self.url = line.split()[1]
        return self

    def _end(self, how: signal.Signals, seconds: float) -> int:
        process, self.process = self.process, None
        if process is None:
            raise RuntimeError("the server does not run")
        process.send_signal(how)
        try:
            return process.wait(seconds)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def kill(self) -> int:
        """SIGKILL; the exit code."""
        return self._end(signal.SIGKILL, 10)

    def stop(self, seconds: float = 30) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM, seconds)

    def rss(self) -> int:
        """Resident memory in bytes."""
        if self.process is None:
            raise RuntimeError("the server does not run")
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def connections(self) -> int:
        """Established client connections."""
        if self.process is None:
            raise RuntimeError("the server does not run")
        port = int(self.url.split(":")[2].split("/")[0])
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in found)

    def errors(self) -> str:
        """What the server wrote to its log, without the failures that the script asks for."""
        self.log.flush()
        self.log.seek(0)
        return _SCRIPTED.sub("", self.log.read())

    def executed(self, thread_id: str) -> list[dict[str, Any]]:
        """The server tools that ran for a thread, in order: ``tool`` and ``args``."""
        self.calls.seek(0)
        calls = [json.loads(line) for line in self.calls]
        return [
            {"tool": call["tool"], "args": call["args"]}
            for call in calls
            if call["thread"] == thread_id
        ]

    def close(self) -> None:
        """Whatever state it is in: gone."""
        if self.process is not None:
            self.kill()
        self.log.close()
        self.calls.close()


async def until(ready: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
    """Look again and again until ``ready``; an error after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        verdict = ready()
        if inspect.isawaitable(verdict):
            verdict = await verdict
        if verdict:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {seconds} s: {inspect.getsource(ready).strip()}")
        await asyncio.sleep(0.05)


def _line(stream: IO[str] | None) -> str:
    return stream.readline() if stream is not None else ""
