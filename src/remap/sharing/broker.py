"""The broker: a small server that keeps named buffers alive by holding their handles alone.

It opens no driver, creates no context and maps nothing, so what kills workers does not touch it, and it needs no GPU.
It knows who has a buffer open: one writer, or many readers; when a client dies the kernel closes its connection, and
what it had open counts no longer. Where somebody waits for that it is seen earlier, and on a device not before the
process has ended (`processes`). What a client has mapped lives on without the broker, too.

One thread, one event loop, and no handler that waits for a client: one that reads slowly, or sends half of something,
holds up nobody but itself.

It is not a scheduler, and no memory service for a cluster: it serves one user on one host, and moves no bytes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from remap.errors import BufferNotFoundError, InUseError, RemapError, ShareError
from remap.sharing.channel import Fds
from remap.sharing.connections import Connections
from remap.sharing.descriptor import Descriptor
from remap.sharing.fdstore import FdStore, Kept, restore
from remap.sharing.named import Client, Lease, Named, Waiting, check_handles, page
from remap.sharing.processes import descriptor_of_end, is_exiting
from remap.sharing.sockets import broker_path
from remap.sharing.wire import (
    LONGEST_PATIENCE,
    LONGEST_WAIT,
    VERSION,
    Fields,
    check_name,
    check_version,
    encode,
    error_fields,
)
from remap.sizes import counted
from remap.types import Access

MOST_BUFFERS = 10_000
_LOOK = 0.005
"""How many seconds lie between two looks at the processes that somebody waits for."""


class Broker:
    """The server: what it keeps, who is connected, and an answer to each kind of request."""

    def __init__(self, path: Path, store: FdStore) -> None:
        self.path = path
        self._store = store
        self._started = time.time()
        self._buffers: dict[str, Named] = {}
        self._waiting: set[Client] = set()
        self._ending: dict[Client, Fds] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._serials = 0
        self._requests = 0
        self._loop = asyncio.get_running_loop()
        self._connections = Connections(path, self._hear, self._left)

    def take_up(self, kept: Sequence[Kept], stray: Sequence[str]) -> None:
        """Keep what an earlier run left with the service manager, and tell that to forget what belongs to nothing."""
        for one in kept:
            self._buffers[one.name] = Named(
                one.key, one.name, one.descriptor, one.descriptor.to_bytes(), one.fds
            )
        for name in stray:
            with suppress(OSError):
                self._store.tell("FDSTOREREMOVE=1", f"FDNAME={name}")

    def close(self) -> None:
        """Stop: nobody can connect any more, clients see the end, and what only the broker held is freed."""
        self._connections.close()
        for client in list(self._ending):
            self._end(client)
        for named in self._buffers.values():
            named.fds.close()
        self._buffers.clear()

    # -- clients --

    def _hear(self, client: Client, request: Fields, fds: Fds) -> None:
        if client.waiting is not None:
            raise ShareError("a request", rule="an answer to the last one is still due")
        self._requests += 1
        self._answer(client, request, fds)

    def _answer(self, client: Client, request: Fields, fds: Fds) -> None:
        handler = self._HANDLERS.get(request.text("op"))
        try:
            if handler is None:
                raise ShareError(
                    f"the request {request.text('op')[:40]!r}",
                    rule="this broker does not know it",
                    next_step="Use the same release of remap at both ends",
                )
            handler(self, client, request, fds)
        except RemapError as error:
            client.channel.send(encode(error_fields(error)), deadline=None)

    def _left(self, client: Client) -> None:
        """Forget a client that has gone, and everything it had open."""
        self._waiting.discard(client)
        waiting, client.waiting = client.waiting, None
        if waiting is not None:
            waiting.timer.cancel()
        end = descriptor_of_end(client.process) if client.writes_on_device else None
        if end is None:
            self._end(client)
        else:
            self._ending[client] = Fds([end])
            self._loop.add_reader(end, self._end, client)

    def _end(self, client: Client) -> None:
        """End the leases of a client that has gone, and whose process writes nothing any more."""
        with self._ending.pop(client, Fds()) as end:
            for number in end.numbers:
                self._loop.remove_reader(number)
        for number, lease in list(client.leases.items()):
            del lease.named.leases[number]
        freed = {lease.named.name for lease in client.leases.values()}
        client.leases.clear()
        for name in freed:
            self._wake(name)

    def _forget_exiting(self, name: str, access: Access) -> bool:
        """End the leases that stand in the way of opening a buffer so if their processes were killed.

        Return whether others stand in the way, which may be killed later.
        """
        named = self._buffers.get(name)
        if named is None or named.on_device:
            return False
        for lease in named.in_the_way(access):
            if not is_exiting(lease.client.process):
                return True
            self._connections.leave(lease.client)
        return False

    def _look(self) -> None:
        """See whether those whom somebody waits for were killed; look again soon if some of them live."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        everyone = [one.waiting for one in self._waiting]
        for wish in {(one.name, one.access) for one in everyone if one is not None}:
            if self._forget_exiting(*wish) and self._next_look is None:
                self._next_look = self._loop.call_later(_LOOK, self._look)

    # -- requests --

    def _hello(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        check_version(request)
        client.channel.send(encode({"version": VERSION, "process": os.getpid()}), deadline=None)

    def _create(self, client: Client, request: Fields, fds: Fds) -> None:
        name = check_name(request.text("name"))
        descriptor = Descriptor.from_bytes(request.blob)
        check_handles(descriptor, fds)
        known = self._buffers.get(name)
        if known is not None and known.data == request.blob:
            # The same request once more, by a client that did not hear the answer to the first.
            named = known
        elif known is not None:
            raise InUseError(
                f'a new buffer "{name}"',
                rule="there is one of that name",
                next_step="Open it, as another process may have been sooner; or drop it first, or use another name",
            )
        else:
            self._check_room(descriptor)
            own = Fds()
            own.take(fds)
            named = Named(secrets.token_hex(8), name, descriptor, request.blob, own)
            try:
                self._store.keep(named.key, name, descriptor, named.fds)
            except OSError as error:
                named.fds.close()
                raise ShareError(
                    f'a new buffer "{name}"', rule=f"the service manager does not take it: {error}"
                ) from error
        lease = self._lease(client, named, Access.READ_WRITE) if request.flag("hold") else 0
        self._buffers[name] = named
        self._wake(name)  # whoever waits is to hear of it, also where this client does not any more
        client.channel.send(encode({"lease": lease}), deadline=None)

    def _open(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        named, access = self._named(request.text("name")), request.access("access")
        patience = request.number("patience", LONGEST_PATIENCE, 0)
        if patience and not self._ready(named.name, access):
            self._wait_until(client, named.name, access, patience, request)
            return
        lease = self._lease(client, named, access)
        client.channel.send(encode({"lease": lease}, named.data), named.fds.numbers, deadline=None)

    def _claim(self, client: Client, request: Fields, fds: Fds) -> None:
        """Open again, without handles, what a client had open when the connection or the broker broke."""
        del fds
        named = self._named(request.text("name"))
        if named.descriptor.identity.hex() != request.text("identity"):
            raise ShareError(f'buffer "{named.name}"', rule="another one has taken its name since")
        client.channel.send(
            encode({"lease": self._lease(client, named, request.access("access"))}), deadline=None
        )

    def _release(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        number = int(request.number("lease", 1 << 53))
        lease = client.leases.pop(number, None)
        if lease is None:
            raise ShareError(f"lease {number}", rule="this client does not hold it")
        del lease.named.leases[number]
        self._wake(lease.named.name)
        client.channel.send(b"{}\0", deadline=None)

    def _drop(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        named = self._named(request.text("name"))
        if named.leases and not request.flag("force"):
            self._forget_exiting(named.name, Access.READ_WRITE)
            named.check_unused()
        del self._buffers[named.name]
        # What the manager does not hear of, it forgets when the service has gone for good.
        with suppress(OSError):
            self._store.forget(named.key, len(named.fds))
        named.fds.close()
        client.channel.send(b"{}\0", deadline=None)

    def _wait(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        name, access = check_name(request.text("name")), request.access("access", Access.NONE)
        limit = request.number("timeout", LONGEST_WAIT)
        if self._ready(name, access):
            client.channel.send(b"{}\0", deadline=None)
        else:
            self._wait_until(client, name, access, limit)

    def _list(self, client: Client, request: Fields, fds: Fds) -> None:
        del fds
        entries, more = page(self._buffers, request.text("after", ""))
        client.channel.send(encode({"buffers": entries, "more": more}), deadline=None)

    def _status(self, client: Client, request: Fields, fds: Fds) -> None:
        del request, fds
        fields = {
            "process": os.getpid(),
            "started": self._started,
            "path": str(self.path),
            "clients": len(self._connections.clients),
            "waiting": len(self._waiting),
            "requests": self._requests,
            "buffers": len(self._buffers),
            "bytes": sum(one.descriptor.mapped_size for one in self._buffers.values()),
            "survives_restart": self._store.present,
        }
        client.channel.send(encode(fields), deadline=None)

    _HANDLERS: ClassVar[dict[str, Callable[[Broker, Client, Fields, Fds], None]]] = {
        "hello": _hello,
        "create": _create,
        "open": _open,
        "claim": _claim,
        "release": _release,
        "drop": _drop,
        "wait": _wait,
        "list": _list,
        "status": _status,
    }

    # -- what they have in common --

    def _named(self, name: str) -> Named:
        found = self._buffers.get(name)
        if found is None:
            raise BufferNotFoundError(
                f'buffer "{name[:200]}"',
                rule="the broker has none of that name",
                next_step="Create it first, or wait for it with wait=",
            )
        return found

    def _check_room(self, descriptor: Descriptor) -> None:
        """Raise `ShareError` unless the broker can keep one more buffer."""
        if len(self._buffers) >= MOST_BUFFERS:
            raise ShareError("a new buffer", rule=f"this broker keeps {MOST_BUFFERS} at most")
        kept, most = sum(len(one.fds) for one in self._buffers.values()), self._connections.most_fds
        if kept + len(descriptor.chunks) > most:
            raise ShareError(
                f"a new buffer of {counted(len(descriptor.chunks), 'chunk')}",
                rule=f"the broker keeps {kept} already, and may open files for {most} (ulimit -n)",
                next_step="Drop what nobody needs, use fewer, larger chunks, or start it with a higher limit",
            )

    def _lease(self, client: Client, named: Named, access: Access) -> int:
        self._forget_exiting(named.name, access)
        if client not in self._connections.clients:  # it was one of those: nobody would end its lease
            raise ConnectionResetError("the client has ended")
        named.check_free(access)
        self._serials += 1
        lease = Lease(named, access, client)
        named.leases[self._serials] = client.leases[self._serials] = lease
        if self._waiting:
            self._look()
        return self._serials

    def _wait_until(
        self, client: Client, name: str, access: Access, limit: float, request: Fields | None = None
    ) -> None:
        """Answer a client when a buffer can be opened so, with what its request asks for then, or at a time limit."""
        timer = self._loop.call_later(limit, self._give_up, client)
        client.waiting = Waiting(name, access, timer, request)
        self._waiting.add(client)
        self._look()

    def _ready(self, name: str, access: Access) -> bool:
        named = self._buffers.get(name)
        return named is not None and not named.in_the_way(access)

    def _wake(self, name: str) -> None:
        """Tell those who wait for a buffer that they can ask for it now, or answer what they have asked."""
        for client in list(self._waiting):
            waiting = client.waiting
            if waiting is not None and waiting.name == name and self._ready(name, waiting.access):
                waiting.timer.cancel()
                client.waiting = None
                self._waiting.discard(client)
                try:
                    if waiting.request is None:
                        client.channel.send(b"{}\0", deadline=None)
                    else:
                        self._answer(client, waiting.request, Fds())
                except OSError:
                    self._connections.leave(client)

    def _give_up(self, client: Client) -> None:
        waiting, client.waiting = client.waiting, None
        self._waiting.discard(client)
        if waiting is None:
            return
        kind: type[RemapError]
        kind, rule = BufferNotFoundError, "nobody has created it in time"
        step = "Create it first, or wait longer"
        if waiting.name in self._buffers:
            kind, rule = InUseError, "others had it open all the time"
            step = "Let them close it, or wait longer"
        error = kind(f'buffer "{waiting.name}"', rule=rule, next_step=step)
        try:
            client.channel.send(encode(error_fields(error)), deadline=None)
        except OSError:
            self._connections.leave(client)


def serve(
    path: str | os.PathLike[str] | None = None, *, on_ready: Callable[[Broker], None] | None = None
) -> None:
    """Run a broker until SIGTERM or SIGINT; then stop in order, and return.

    `path` is that of its socket, by default one in a private directory of this user. Raises `InUseError` if a live
    broker serves there, `InvalidValueError` for a path that is too long. `on_ready` is called when clients can connect.
    Under a service manager with a descriptor store (systemd), a restart keeps every buffer.
    """
    kept, stray = restore(os.environ)  # before anything else can take their numbers for its own
    asyncio.run(_serve(broker_path() if path is None else Path(path), on_ready, kept, stray))


async def _serve(
    path: Path, on_ready: Callable[[Broker], None] | None, kept: Sequence[Kept], stray: Sequence[str]
) -> None:
    store = FdStore(os.environ)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    broker = Broker(path, store)
    try:
        broker.take_up(kept, stray)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        with suppress(OSError):
            store.tell("READY=1", f"STATUS=serving at {path}")
        if on_ready is not None:
            on_ready(broker)
        await stop.wait()
        with suppress(OSError):
            store.tell("STOPPING=1")
    finally:
        broker.close()
