"""Vectors of float32 that need not fit into memory: made up, read from .npy files, and written to one."""

from __future__ import annotations

import os
import tokenize
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from remap.errors import InvalidValueError

PIECE = 1 << 22
"""The elements that are held in memory at a time (16 MiB)."""

_LARGE = 64 << 20  # files from here on are mapped and not read

Float32 = NDArray[np.float32]


class Vector(Protocol):
    """A source of numbers."""

    @property
    def length(self) -> int:
        """How many there are."""
        ...

    def piece(self, start: int, stop: int) -> Float32:
        """Return the elements from `start` (a multiple of `PIECE`) to `stop`, at most `PIECE` of them."""
        ...


class RandomVector:
    """Numbers in [0, 1) that a seed determines, the same ones each time a piece is asked for."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._seed = seed

    def piece(self, start: int, stop: int) -> Float32:
        """Return the elements from `start` to `stop`."""
        numbers: Float32 = np.random.default_rng((self._seed, start)).random(stop - start, dtype=np.float32)
        return numbers


class FileVector:
    """The one-dimensional float32 array of a .npy file."""

    def __init__(self, path: str) -> None:
        self._array = _load(path)
        self.length = len(self._array)

    def piece(self, start: int, stop: int) -> Float32:
        """Return the elements from `start` to `stop`."""
        return np.ascontiguousarray(self._array[start:stop])


def _load(path: str) -> Float32:
    step = "Write it with numpy.save(path, array.astype(numpy.float32))"
    try:
        large = os.path.getsize(path) > _LARGE
        loaded: Any = np.load(path, mmap_mode="r" if large else None, allow_pickle=False)
    except OSError as error:
        raise InvalidValueError(
            f"read {path}", rule=error.strerror or str(error), next_step="Name a .npy file"
        ) from error
    except (ValueError, TypeError, EOFError, SyntaxError, OverflowError, tokenize.TokenError) as error:
        rule = f"it is no .npy file, or is cut short ({_first_line(error)})"
        raise InvalidValueError(f"read {path}", rule=rule, next_step=step) from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise InvalidValueError(f"read {path}", rule="it is an archive of several arrays", next_step=step)
    array = cast("Float32", loaded)
    if array.dtype != np.float32 or array.ndim != 1:
        rule = (
            f"it is a {array.ndim}-dimensional array of {array.dtype}, and the kernel adds vectors of float32"
        )
        raise InvalidValueError(f"read {path}", rule=rule, next_step=step)
    return array


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class NpyWriter:
    """Writes a float32 vector to a .npy file piece by piece. Made by `writing`; `discard` drops the file at the end."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file = file
        self.discard = False
        header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, header)

    def write(self, piece: Float32) -> None:
        """Write the next elements."""
        self._file.write(piece.data)


def check_writable(path: str) -> Path:
    """Return where a file will be written; raises `InvalidValueError`, before any work is done, if it cannot be."""
    target = Path(os.path.realpath(path))
    rule = ""
    if target.is_dir():
        rule = "it is a directory"
    elif target.exists() and not target.is_file():
        rule = "it exists and is no regular file"
    elif not target.parent.is_dir():
        rule = f"there is no directory {target.parent}"
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        rule = f"the directory {target.parent} is not writable"
    if rule:
        raise InvalidValueError(
            f"write {path}", rule=rule, next_step="Name a file in a directory that you can write to"
        )
    return target


@contextmanager
def writing(target: Path, length: int) -> Generator[NpyWriter]:
    """Write a vector to a file that appears, whole, when the block ends well, and not at all otherwise."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            writer = NpyWriter(file, length)
            yield writer
            file.flush()
            os.fsync(file.fileno())
        if not writer.discard:
            os.replace(temporary, target)
    except OSError as error:
        raise InvalidValueError(f"write {target}", rule=error.strerror or str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
