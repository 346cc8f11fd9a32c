"""Compiled kernels on disk, so that a program that starts again compiles nothing.

A file is named by the digest of everything that its content depends on: the source as it goes to the compiler, the
architecture, the options, and the compiler's version. It lies in a directory that only its owner can enter, appears
whole (written beside, then renamed, so that several programs may do it at once), and begins with the digest of the
rest, so that a damaged file is compiled anew. Whoever can write there can run code as you: a directory that others may
write to is not used.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_DIGEST = 32


def directory() -> Path | None:
    """Return where compiled kernels are kept, None where that is turned off (`REMAP_CACHE=0`)."""
    named = os.environ.get("REMAP_CACHE")
    if named is not None:
        return None if named in ("", "0") else Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        if home == "~":  # a user without a home
            return None
        base = f"{home}/.cache"
    return Path(base) / "remap" / "kernels"


def key(*parts: str) -> str:
    """Return the name for what is made from these."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def read(name: str) -> bytes | None:
    """Return what is kept under a name, None if there is nothing that can be trusted."""
    folder = _private()
    if folder is None:
        return None
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        data = file.read()
    digest, content = data[:_DIGEST], data[_DIGEST:]
    return content if digest == hashlib.sha256(content).digest() else None


def write(name: str, content: bytes) -> None:
    """Keep content under a name; where that cannot be, nothing is kept and nothing is said."""
    folder = _private()
    if folder is None:
        return
    with suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def _private() -> Path | None:
    """Return the directory, made if there is none; None if anybody else could have written to it."""
    folder = directory()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return None
    fine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if fine else None
