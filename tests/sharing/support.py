"""A broker in a process of its own, and children with roles to play."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from remap.testing.bench import wait_until

LIMIT = 60.0
COMMAND = (sys.executable, "-W", "error", "-c", "from remap.cli import main; main()")


class BrokerProcess:
    """`remap serve` in a process of its own."""

    def __init__(
        self,
        path: Path,
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] = COMMAND,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.path = path
        self._environment = {**os.environ, **(environment or {})}
        self._command = command
        self._pass_fds = pass_fds
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        """Start it, and wait until clients can connect."""
        self._stack = ExitStack()
        self.process = self._stack.enter_context(
            subprocess.Popen(
                [*self._command, "serve", "--path", str(self.path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
                pass_fds=self._pass_fds,
            )
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        said = self.process.stdout.readline()
        assert said == f"serving at {self.path}\n", said + self.process.stderr.read()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait(LIMIT)
        self._stack.close()

    def stop(self) -> tuple[int, str]:
        """Stop it in order; return its exit status and what it said to the error stream."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        status = self.process.wait(LIMIT)
        said = self.process.stderr.read()
        self._stack.close()
        return status, said

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Let it do nothing for a block: what is said to it there comes all at once, in order."""
        state = Path(f"/proc/{self.process.pid}/stat")
        self.process.send_signal(signal.SIGSTOP)
        try:
            assert wait_until(lambda: state.read_bytes().rpartition(b") ")[2][:1] == b"T")
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def fds(self) -> int:
        """Return how many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._stack.close()


class Child:
    """A child process that plays a role: a function of (link, driver, *arguments)."""

    def __init__(self, role: Callable[..., None], *arguments: Any, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self.link: Connection
        self.link, other = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=role, args=(other, os.environ["REMAP_DRIVER"], *arguments), daemon=True
        )
        self.process.start()
        other.close()

    def hear(self) -> Any:
        """Return what it says next; raises what it raised."""
        assert self.link.poll(LIMIT), "the child says nothing"
        answer = self.link.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def tell(self, what: object) -> None:
        """Send it something."""
        self.link.send(what)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT)
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        """Wait for its end, which must be a good one."""
        self.process.join(LIMIT)
        assert self.process.exitcode == 0
        self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join(LIMIT)
        self.link.close()


class ServiceManager:
    """What systemd is to a service: takes notifications and descriptors, and gives those to the next start."""

    LAUNCH = """
import fcntl, os, sys
numbers, names = [int(one) for one in sys.argv[1].split(",") if one], sys.argv[2]
high = [fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in numbers]
for index, number in enumerate(high):
    os.dup2(number, 3 + index)
for number in high:
    os.close(number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(numbers)), LISTEN_FDNAMES=names)
os.execv(sys.executable, sys.argv[3:])
"""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.store: dict[str, int] = {}
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            message, numbers, _, _ = socket.recv_fds(self._socket, 4096, 10)
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            name = fields.get("FDNAME", "")
            if "FDSTORE" in fields:
                assert len(numbers) == 1
                assert name.isascii()
                assert ":" not in name
                self.store[name] = numbers[0]
            elif "FDSTOREREMOVE" in fields:
                os.close(self.store.pop(name))
            elif "STOP" in fields:
                return
            self.said.append(message.decode())

    def run(self, path: Path) -> BrokerProcess:
        """Start the service with what is in the store."""
        numbers = ",".join(map(str, self.store.values()))
        arguments = (numbers, ":".join(self.store), sys.executable, *COMMAND[1:])
        command = (sys.executable, "-c", self.LAUNCH, *arguments)
        environment = {"NOTIFY_SOCKET": str(self.path)}
        return BrokerProcess(path, environment, command, tuple(self.store.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(b"STOP=1", str(self.path))
        self._thread.join(LIMIT)
        self._socket.close()
        for number in self.store.values():
            os.close(number)
