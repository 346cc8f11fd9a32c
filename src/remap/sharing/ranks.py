"""The exchanges of mpi4py and of torch.distributed."""

from __future__ import annotations

import importlib
import time
from datetime import timedelta
from typing import Any, ClassVar

from remap.errors import ShareError
from remap.sharing.channel import deadline_in
from remap.sharing.exchange import _LONGEST, TIMEOUT, Exchange, _Gathering, _largest, _Star


class MpiExchange(_Star):
    """The exchange of an mpi4py communicator, `COMM_WORLD` by default. Every rank of it makes one.

    Its messages travel on a duplicate of the communicator, so that they cannot be taken for the program's own. MPI can
    break no wait of others: they fail at their own time limits. What was being sent then is never completed, and
    `MPI_Finalize` may wait for it: end such a program with `MPI.COMM_WORLD.Abort()`.
    """

    _TAGS: ClassVar[int] = 1 << 14  # every MPI has twice as many

    def __init__(self, communicator: Any = None, *, timeout: float = TIMEOUT) -> None:
        mpi = self._mpi = _optional("mpi4py.MPI")
        parent = mpi.COMM_WORLD if communicator is None else communicator
        super().__init__(parent.Get_rank(), parent.Get_size(), timeout)
        self._members = list(range(self.size))
        self._tag, self._next_tag = 1, [2]
        self._pending: list[tuple[Any, bytes]] = []
        duplicate: Any
        duplicate, request = parent.Idup()
        self._communicator = duplicate
        self._complete(request, deadline_in(timeout))

    def _part(self, groups: list[list[int]]) -> Exchange:
        # Not Comm.Split, which waits without a limit.
        mine = next(group for group in groups if self.rank in group)
        part = object.__new__(MpiExchange)
        _Gathering.__init__(part, mine.index(self.rank), len(mine), self.timeout)
        part._mpi, part._communicator = self._mpi, self._communicator
        part._members = [self._members[rank] for rank in mine]
        part._tag, part._next_tag = self._next_tag[0] % self._TAGS, self._next_tag
        part._pending = []
        self._next_tag[0] += 1
        return part

    def _send(self, rank: int, data: bytes, deadline: float) -> None:
        mpi = self._mpi
        request = self._communicator.Isend([data, mpi.BYTE], dest=self._members[rank], tag=self._tag)
        # MPI reads the bytes until the request has completed, whether somebody waits for it or not.
        self._pending.append((request, data))
        self._complete(request, deadline)
        self._pending.pop()

    def _receive(self, rank: int, deadline: float) -> bytes:
        mpi, source = self._mpi, self._members[rank]
        pause = _Pause(deadline)
        while True:
            status = mpi.Status()
            message = self._communicator.Improbe(source=source, tag=self._tag, status=status)
            if message is not None:
                break
            pause()
        length = status.Get_count(mpi.BYTE)
        if length > _largest(self.size):
            raise ShareError(f"{length} bytes from rank {rank}", rule="no step of an exchange has that many")
        data = bytearray(length)
        self._complete(message.Irecv([data, mpi.BYTE]), deadline)
        return bytes(data)

    def _complete(self, request: Any, deadline: float) -> None:
        pause = _Pause(deadline)
        while not request.Test():
            pause()


class TorchExchange(_Gathering):
    """The exchange of a torch.distributed process group, the default one if None. Every rank of it makes one.

    Works over any backend: over NCCL the bytes travel through memory of the current CUDA device.
    """

    def __init__(self, group: Any = None, *, timeout: float = TIMEOUT) -> None:
        torch = self._torch = _optional("torch")
        dist = self._dist = _optional("torch.distributed")
        self._group = group
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        backends = str(dist.get_backend_config(group))
        self._device = "cpu" if "cpu" in backends else f"cuda:{torch.cuda.current_device()}"

    def _gather(self, data: bytes, deadline: float) -> list[bytes]:
        torch = self._torch
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [int(one.item()) for one in self._tensors(length, deadline)]
        longest = max(lengths)
        if min(lengths) < 0 or longest > _LONGEST:
            raise ShareError(f"{longest} bytes from a rank", rule="no step of an exchange has that many")
        if not longest:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device)
        found = self._tensors(padded, deadline)
        return [one.cpu().numpy().tobytes()[:size] for one, size in zip(found, lengths, strict=True)]

    def _tensors(self, tensor: Any, deadline: float) -> list[Any]:
        """Gather a tensor of the same length from each rank."""
        outputs = [self._torch.empty_like(tensor) for _ in range(self.size)]
        work = self._dist.all_gather(outputs, tensor, group=self._group, async_op=True)
        pause = _Pause(deadline)
        while not work.is_completed():
            pause()
        work.wait()  # raises what went wrong, and orders the current stream after the gathering
        return outputs

    def _part(self, groups: list[list[int]]) -> Exchange:
        if len(groups) == 1:
            return self
        dist = self._dist
        own: Any = None
        for ranks in groups:  # every rank takes part in making every group
            named = (
                ranks if self._group is None else [dist.get_global_rank(self._group, one) for one in ranks]
            )
            made = dist.new_group(named, timeout=timedelta(seconds=self.timeout))
            own = made if self.rank in ranks else own
        return TorchExchange(own, timeout=self.timeout)


def _optional(name: str) -> Any:
    """Import a library that remap does without, untyped."""
    return importlib.import_module(name)


class _Pause:
    """Gives way to other processes between two looks, at first briefly; raises at the deadline."""

    __slots__ = ("_deadline", "_turns")

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._turns = 0

    def __call__(self) -> None:
        if time.monotonic() >= self._deadline:
            raise TimeoutError
        self._turns += 1
        # Ranks may outnumber cores: whoever waits must let the one run that is waited for.
        time.sleep(0 if self._turns < 50 else min(1e-5 * self._turns, 1e-3))
