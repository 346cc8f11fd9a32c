"""Fuzz what arrives from other processes, guided by coverage: `pip install atheris`, then

    PYTHONPATH=src python tools/fuzz_sharing.py -max_total_time=600

Not in the tests, which do the same with random input (tests/sharing): atheris brings 35 MB and a compiler's runtime.
Anything but an error of remap is a finding.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, cast

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore] # pyright: ignore[reportMissingImports]

with cast("Any", atheris).instrument_imports():
    from remap.errors import RemapError
    from remap.sharing.channel import Fds, parse_first
    from remap.sharing.descriptor import Descriptor
    from remap.sharing.exchange import _unpacked
    from remap.sharing.exported import receive
    from remap.sharing.wire import Fields, check_name

MAGICS = (b"", b"remapmem\x01\x00", b"remaptkt\x00\x00" + bytes(32) + b"remapmem\x01\x00")


def one(data: bytes) -> None:
    """Read `data` in every way in which bytes of others are read."""
    for magic in MAGICS:  # which no fuzzer finds by chance
        with suppress(RemapError):
            found = Descriptor.from_bytes(magic + data)
            assert Descriptor.from_bytes(found.to_bytes()) == found
        with suppress(RemapError):
            receive(magic + data, timeout=0.001)
    with suppress(RemapError):
        parse_first(data, Fds(), 4096)
    with suppress(RemapError):
        _unpacked(data, 3)
    with suppress(RemapError):
        fields = Fields.decode(data)
        for read in (fields.text, fields.flag, fields.items, lambda name: fields.number(name, 1e9)):
            with suppress(RemapError):
                read("name")
        with suppress(RemapError):
            check_name(fields.text("name"))
        fields.raise_error()


if __name__ == "__main__":
    cast("Any", atheris).Setup(sys.argv, one)
    cast("Any", atheris).Fuzz()
