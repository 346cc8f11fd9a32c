"""Changes: what a buffer that grows and shrinks excludes while it does, and what goes on meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from remap.blocks import block
from remap.buffers.base import SHARED, SHARED_STEP, Buffer
from remap.buffers.shares import Share
from remap.errors import InUseError
from remap.launches import launches
from remap.lifetime import tell, watchers
from remap.locations import device
from remap.uses import After, Known, wait_after


class ChangingBuffer(Buffer):
    """A buffer whose chunks come and go while others use it.

    One change at a time: `_changing` says which, and the second one raises `InUseError`. What only adds memory leaves
    everything else alone, so uses go on beside it; what takes memory or rights away excludes them as well. `_shares`
    are the chunks that other buffers have mapped, too, by address.
    """

    _changing: str = ""
    _shares: dict[int, Share]

    # An interrupt comes where a call returns, leaving a lock included. So what is set is set inside the block that
    # resets it, and reset without a call: a buffer that is "being paused" for ever could not even be closed.

    @block
    def _change(self, doing: str) -> Generator[None]:
        """Exclude other changes for a block; `doing` is a past participle. Uses go on."""
        begun = False
        try:
            with self._driver.lock:
                self._check()
                if self._changing or self._taken:
                    raise InUseError(
                        f"{self.kind} {self.serial} to be {doing}",
                        rule=f"it is being {self._changing or self._taken} by another thread",
                        next_step="Let that end first",
                    )
                self._check_backed("a change")
                self._changing, begun = doing, True
            if watchers:
                tell("begin", self, doing)
            try:
                yield
            finally:
                if watchers:
                    tell("end", self, doing)
        finally:
            if begun:
                self._changing = ""

    @block
    def _taking(self, doing: str, blind: bool = True) -> Generator[None]:
        """Exclude changes and uses for a block of another room that takes the memory away, or gives it back."""
        begun = False
        try:
            with self._driver.lock:
                self._check()
                self._check_unchanging(doing)
                self._changing, begun = doing, True
            with super()._taking(doing, blind):
                yield
        finally:
            if begun:
                self._changing = ""

    @block
    def _excluding(self, doing: str, *, detach: bool | None = None) -> Generator[None]:
        """Exclude uses, and arrays of other libraries, for a part of a change that takes memory or rights away.

        `detach` lets other processes keep what they hold of it; None where who asks for the change has no such choice.
        """
        asked = f"{self.kind} {self.serial} to be {doing}"
        begun = False
        try:
            with self._driver.lock:
                self._check()
                self._check_registrations(doing)
                self._check_free(doing, self._exports)
                if self._arriving is not None:
                    raise InUseError(
                        asked,
                        rule="its contents are still arriving",
                        next_step="Close what remap.resume returned",
                    )
                if self._shared and not detach:
                    raise InUseError(
                        asked,
                        rule=SHARED,
                        next_step="Copy what is needed into another buffer, which they do not hold"
                        if detach is None
                        else SHARED_STEP,
                    )
                self._taken, begun = doing, True
            try:
                yield
            finally:
                launches.renew()  # as `Range._taking` does
        finally:
            if begun:
                self._taken = ""

    def _check_unchanging(self, doing: str) -> None:
        if self._changing:
            raise InUseError(
                f"{self.describe()} to be {doing}",
                rule=f"it is being {self._changing} by another thread",
                next_step="Let that end first",
            )

    def _check_closable(self) -> None:
        self._check_unchanging("closed")
        super()._check_closable()

    def _wait(self, doing: str, after: After) -> None:
        """Wait for the work that may still use the memory, or for what the caller names."""
        asked = f"{self.kind} {self.serial} to be {doing}"
        if isinstance(after, Known):
            self._wait_for_work(asked)
        else:
            users = self.accessing
            wait_after(after, users[0] if users else device(), asked)


def shares_of(buffer: Buffer) -> Mapping[int, Share]:
    """Return the chunks that a buffer shares with forks, by address."""
    return buffer._shares if isinstance(buffer, ChangingBuffer) else {}
