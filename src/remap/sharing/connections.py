"""Who is connected with a broker: room for all of them, and limits for those who say nothing.

A client that has nothing open costs the broker a descriptor, and loses nothing with its connection: at its next request
it connects again by itself. So where there is no room for another one, the client that has been silent longest goes, of
those that neither have anything open nor wait. Who has a buffer open stays, however long it is silent. Only who
connects, or begins a message, has to say the rest in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from remap.errors import RemapError, ShareError
from remap.sharing.channel import Fds, raise_limit
from remap.sharing.named import Client
from remap.sharing.sockets import Listener
from remap.sharing.wire import Fields, encode, error_fields

MOST_CLIENTS = 1_000
PATIENCE = 10.0
"""How many seconds a client may take for its first message, and for the rest of one that it has begun."""

_OWN = 32
"""How many descriptors are kept for the event loop, and for files that the broker looks into."""

_BREATH = 0.1


class Connections:
    """The clients of a broker, from their coming to their going; `answer` is given what they say, message by message.

    `left` hears of each that has gone. Descriptors are shared out between clients and memory (`most_fds` is what is
    left for that), so that one can always connect and drop what nobody needs.
    """

    def __init__(
        self, path: Path, answer: Callable[[Client, Fields, Fds], None], left: Callable[[Client], None]
    ) -> None:
        self.clients: set[Client] = set()
        limit = max(raise_limit() - _OWN, 2)
        self._most = min(MOST_CLIENTS, limit // 2)
        self.most_fds = limit - self._most
        self._answer, self._left = answer, left
        self._listener = Listener(path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Let nobody connect any more, and hang up on all."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for client in list(self.clients):
            self.leave(client)

    def leave(self, client: Client, why: RemapError | None = None) -> None:
        """Hang up on a client, and tell it why if there is a reason; doing so again does nothing."""
        if client not in self.clients:
            return
        self.clients.remove(client)
        self._loop.remove_reader(client.channel)
        if client.due is not None:
            client.due.cancel()
        if why is not None:
            client.channel.hang_up(encode(error_fields(why)))
        client.close()
        self._left(client)

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except OSError:  # out of descriptors: look again when some may have been closed
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_BREATH, self._accept_again)
            return
        if channel is None:
            return
        if len(self.clients) >= self._most and not self._make_room():
            channel.hang_up(encode(error_fields(self._too_many())))
            return
        client = Client(channel, self._loop.time())
        self.clients.add(client)
        client.due = self._loop.call_later(PATIENCE, self.leave, client)
        self._loop.add_reader(channel, self._receive, client)

    def _accept_again(self) -> None:
        if self._listener.listening:
            self._loop.add_reader(self._listener, self._accept)

    def _make_room(self) -> bool:
        """Hang up on the client that has been silent longest, of those that lose nothing; return whether there is one.

        It is not told why: it would take that for the answer to its next request.
        """
        idle = [one for one in self.clients if not (one.leases or one.waiting)]
        if idle:
            self.leave(min(idle, key=lambda one: one.heard))
        return bool(idle)

    def _too_many(self) -> ShareError:
        return ShareError(
            "a connection with the broker",
            rule=f"it serves {self._most} clients, and all of them have buffers open or wait for some",
            next_step=f"Close what is not needed any more; it serves up to {MOST_CLIENTS} if it may open enough files "
            "(ulimit -n)",
        )

    def _receive(self, client: Client) -> None:
        try:
            found = client.receive()
            if found is None:
                if client.due is None:
                    client.due = self._loop.call_later(PATIENCE, self.leave, client)
                return
            if client.due is not None:
                client.due.cancel()
                client.due = None
            client.heard = self._loop.time()
            request, fds = found
            with fds:
                self._answer(client, request, fds)
        except (OSError, EOFError):  # it has gone, or does not read
            self.leave(client)
        except ShareError as error:  # it is none of ours
            self.leave(client, error)
