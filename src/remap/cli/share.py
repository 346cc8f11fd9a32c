"""`remap demo share`: one buffer, two processes, and what each of them sees."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

import remap
from remap import MiB, drivers
from remap.cli.choice import choose_driver
from remap.cli.partner import Partner
from remap.cli.report import Report
from remap.cli.waived import Waived
from remap.sizes import format_size

SIZE = 4 * MiB


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the other process saw: where it has the buffer, its first bytes, and how a write ended."""

    process: int
    address: int
    before: bytes
    after: bytes
    refusal: str


def run(driver: str | None, device: int | None) -> bool:
    """Run the program and tell whether both processes saw the same memory."""
    report = Report()
    report.say("one buffer in two processes", "bold")
    choose_driver(driver, report)
    right = False
    try:
        where = remap.device(device)
        if not where.capabilities["posix_fd"]:
            raise Waived(f"{where} cannot share memory: {where.capabilities['posix_fd'].reason}")
        right = _share(where, report)
    finally:
        drivers.close()
    report.say("PASS" if right else "FAIL", "bold green" if right else "bold red")
    return right


def _share(where: remap.Device, report: Report) -> bool:
    first, second = (np.frombuffer(text.encode(), np.uint8) for text in ("written first", "written later"))
    with remap.allocate(SIZE, resident=where, shareable="posix_fd") as buffer:
        buffer.copy_from_host(first)
        report.step("writer", _view("this process", buffer.address, first.tobytes(), '"rw"'))
        with Partner(_read) as reader:
            with remap.export(buffer, access="r") as exported:
                reader.tell(exported)
                reader.hear()
            buffer.copy_from_host(second)  # it has happened when the call returns, and the message follows it
            reader.tell("changed")
            seen: _Seen = reader.hear()
    report.step("reader", _view(f"process {seen.process}", seen.address, seen.before, '"r"'))
    report.step("writer", f"writes {_text(second.tobytes())} at its own address")
    report.step("reader", [f"sees {_text(seen.after)} at its own, with no copy between them"])
    report.step("", f"its write is refused: {seen.refusal or 'NO, it was not'}")
    return (seen.before, seen.after) == (first.tobytes(), second.tobytes()) and bool(seen.refusal)


def _view(who: str, address: int, text: bytes, access: str) -> str:
    return f"{who} has {format_size(SIZE)} at {address:#x}, access {access}, and sees {_text(text)}"


def _text(content: bytes) -> str:
    return f'"{content.decode(errors="replace")}"'


def _read(link: Connection) -> None:
    """Be the other process."""
    with remap.open(link.recv(), access="r") as buffer:
        before = buffer.to_host("uint8", 13).tobytes()
        link.send("open")
        link.recv()
        after = buffer.to_host("uint8", 13).tobytes()
        refusal = ""
        try:
            buffer.fill(0)
        except remap.AccessError as error:
            refusal = error.rule
        link.send(_Seen(os.getpid(), buffer.address, before, after, refusal))
