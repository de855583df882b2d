"""A server process that the tests own: start it, break it, start it again."""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar, Self

import psutil

from servers.proxy import TcpProxy

__all__ = ["HOST", "ServerError", "ServerProcess", "free_port"]

HOST = "127.0.0.1"

_NOBODY = 65534


class ServerError(RuntimeError):
    """A server could not be found, did not start, or does not obey. Says what to do."""


def free_port() -> int:
    """A port that nobody listens on, below the range the kernel gives to client sockets:
    a server that is killed finds it free when it comes back."""
    for _ in range(200):
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerError("no free port on loopback")


class ServerProcess(abc.ABC):
    """One server on loopback. Use it with ``with``, or call :meth:`start` and :meth:`close`.

    Port and data directory stay the same through :meth:`kill` and :meth:`start`, so a client
    finds its data again, as after a crash.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    start_seconds: ClassVar[float] = 60.0
    """How long a start may take on a busy machine."""

    def __init__(self) -> None:
        self.host = HOST
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix=f"chatkeep-{self.name}-"))
        self.log_file = self.directory / "server.log"
        # Servers that refuse to run as root run as a user that every Unix has.
        self.uid: int | None = _NOBODY if os.geteuid() == 0 else None
        if self.uid is not None:
            os.chown(self.directory, self.uid, self.uid)
        self._process: psutil.Popen | None = None
        self._prepared = False
        atexit.register(self.close)

    # -- what a database fills in ---------------------------------------------------

    def _prepare(self) -> None:
        """Once, before the first start (create a cluster, write a configuration)."""
        return

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """Absolute path of the program, and its arguments."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Whether the server takes connections."""

    # -- life -----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    def start(self) -> Self:
        """Start, or start again on the same data, and wait until it takes connections."""
        if self._process is not None:
            raise ServerError(f"{self.name} is already running")
        if not self._prepared:
            self._prepare()
            self._prepared = True
        with self.log_file.open("ab") as log:
            self._process = psutil.Popen(
                self._as_user(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment(),
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_seconds
        while not self._ready():
            if (code := self._process.poll()) is not None:
                self._process = None
                raise ServerError(f"{self.name} ended with {code} at start:\n{self.log()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(f"{self.name} is not ready:\n{self.log()}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Orderly stop; the data stays."""
        process, tree = self._running(), self._tree()
        process.send_signal(self.stop_signal)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(20)
        self._end(tree)

    def kill(self) -> None:
        """SIGKILL for the server and its children at one instant; the data stays.

        They are stopped first, or a child would notice the others' end and tidy up.
        """
        self.pause()
        self._end(self._tree())

    def pause(self) -> None:
        """Freeze the server and its children: connections stay open, nothing answers."""
        frozen: set[int] = set()
        while new := [p for p in self._tree() if p.pid not in frozen]:
            for process in new:
                _signal(process, signal.SIGSTOP)
                frozen.add(process.pid)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        for process in reversed(self._tree()):
            _signal(process, signal.SIGCONT)

    def close(self) -> None:
        """Stop at once and delete the data. Idempotent."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- tools ------------------------------------------------------------------------

    def proxy(self) -> TcpProxy:
        """A :class:`TcpProxy` in front of the server, not started yet."""
        return TcpProxy(self.host, self.port)

    def log(self, tail: int = 4_000) -> str:
        """The end of what the server has printed."""
        if not self.log_file.exists():
            return ""
        return self.log_file.read_text(errors="replace")[-tail:]

    def _run(self, *command: str) -> None:
        """Run a helper program to its end, as the server's user."""
        done = subprocess.run(
            self._as_user(list(command)),
            cwd=self.directory,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerError(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")

    def _environment(self) -> dict[str, str]:
        """Of the server: the tests' own settings (``PGHOST``, …) do not reach it."""
        return {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(self.directory)}

    def _as_user(self, command: list[str]) -> list[str]:
        launcher = str(Path(__file__).with_name("_launch.py"))
        uid = "-" if self.uid is None else str(self.uid)
        return [sys.executable, "-I", "-S", launcher, str(os.getpid()), uid, *command]

    def _running(self) -> psutil.Popen:
        if self._process is None:
            raise ServerError(f"{self.name} is not running")
        return self._process

    def _tree(self) -> list[psutil.Process]:
        # By parent id alone: psutil's own children() also compares times of creation, which move
        # where the kernel's boot time does, and then leaves some out.
        by_parent: dict[int, list[psutil.Process]] = {}
        for other in psutil.process_iter(["ppid"]):
            by_parent.setdefault(other.info["ppid"], []).append(other)
        found: list[psutil.Process] = [self._running()]
        for parent in found:
            found.extend(by_parent.get(parent.pid, []))
        return found

    def _end(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            _signal(process, signal.SIGKILL)
        self._running().wait(10)
        self._process = None
        # The others are not our children: the init process collects them when it likes.
        deadline = time.monotonic() + 10
        while any(map(_lives, processes)) and time.monotonic() < deadline:
            time.sleep(0.005)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    # Not through psutil, which refuses when the time of creation seems to have changed.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
