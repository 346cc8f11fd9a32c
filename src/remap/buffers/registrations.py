"""`Registration`: word that another library has registered a buffer's memory, which then stays where it is.

A driver cannot say who registered memory (NCCL's communicators, network adapters), and going on with what is not
there any more faults or sends other bytes. So whoever registers says so, and what would take the memory away refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from remap.errors import InUseError

if TYPE_CHECKING:
    from remap.buffers.base import Buffer


class Registration:
    """Word that another library holds a buffer's memory. Made by `Buffer.registered` and `remap.torch.registered`.

    Until it is closed, the buffer refuses to pause, migrate, shrink and close. `by` says who holds it.
    """

    __slots__ = ("_buffer", "by")

    def __init__(self, buffer: Buffer, by: str) -> None:
        self.by = by
        self._buffer = buffer
        with buffer._driver.lock:  # against whoever would take the memory away
            buffer._check()
            buffer._check_backed(f"a registration by {by}")
            if buffer._taken:
                raise InUseError(
                    f"a registration of {buffer.describe()} by {by}",
                    rule=f"it is being {buffer._taken} by another thread",
                    next_step="Let that end first",
                )
            buffer._uses.escaped = True
            buffer._registrations = (*buffer._registrations, self)

    def close(self) -> None:
        """Note that the other library has deregistered the memory. Closing again does nothing."""
        buffer = self._buffer
        with buffer._driver.lock:
            buffer._registrations = tuple(one for one in buffer._registrations if one is not self)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return who holds what, and whether still."""
        state = "" if self in self._buffer._registrations else ", closed"
        return f"<remap.Registration of {self._buffer.describe()} by {self.by}{state}>"
