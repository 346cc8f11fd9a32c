"""`remap demo share`: one buffer, two processes, and what each of them sees."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

import remap
from remap import MiB, drivers
from remap.cli.choice import choose_driver
from remap.cli.report import Report
from remap.cli.waived import Waived
from remap.sizes import format_size

SIZE = 4 * MiB
_LIMIT = 60.0


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
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    first, second = (np.frombuffer(text.encode(), np.uint8) for text in ("written first", "written later"))
    with ours, remap.allocate(SIZE, resident=where, shareable="posix_fd") as buffer:
        buffer.copy_from_host(first)
        report.step("writer", _view("this process", buffer.address, first.tobytes(), '"rw"'))
        arguments = (theirs, remap.driver().name)
        child = spawn.Process(target=_read, args=arguments, daemon=True)
        child.start()
        theirs.close()
        try:
            with remap.export(buffer, access="r") as exported:
                ours.send(exported)
                _answer(ours)
            buffer.copy_from_host(second)  # it has happened when the call returns, and the message follows it
            ours.send("changed")
            seen = _answer(ours)
        except BaseException:
            child.kill()  # it waits for what will not come
            raise
        finally:
            child.join(_LIMIT)
            child.kill()
    report.step("reader", _view(f"process {seen.process}", seen.address, seen.before, '"r"'))
    report.step("writer", f"writes {_text(second.tobytes())} at its own address")
    report.step("reader", [f"sees {_text(seen.after)} at its own, with no copy between them"])
    report.step("", f"its write is refused: {seen.refusal or 'NO, it was not'}")
    return (seen.before, seen.after) == (first.tobytes(), second.tobytes()) and bool(seen.refusal)


def _view(who: str, address: int, text: bytes, access: str) -> str:
    return f"{who} has {format_size(SIZE)} at {address:#x}, access {access}, and sees {_text(text)}"


def _text(content: bytes) -> str:
    return f'"{content.decode(errors="replace")}"'


def _answer(link: Connection) -> _Seen:
    """Return what the other process says; raises `ShareError` if it says nothing, and its own error if it met one."""
    if not link.poll(_LIMIT):
        raise remap.ShareError("the other process", rule=f"it said nothing for {_LIMIT:g} s")
    try:
        answer = link.recv()
    except EOFError:
        raise remap.ShareError("the other process", rule="it ended early") from None
    if isinstance(answer, remap.RemapError):
        raise answer
    assert isinstance(answer, _Seen)
    return answer


def _read(link: Connection, driver: str) -> None:
    """Be the other process."""
    try:
        remap.use(driver)
        with remap.open(link.recv(), access="r") as buffer:
            before = buffer.to_host("uint8", 13).tobytes()
            link.send(_Seen(os.getpid(), buffer.address, before, b"", ""))
            link.recv()
            after = buffer.to_host("uint8", 13).tobytes()
            refusal = ""
            try:
                buffer.fill(0)
            except remap.AccessError as error:
                refusal = error.rule
            link.send(_Seen(os.getpid(), buffer.address, before, after, refusal))
    except remap.RemapError as error:
        link.send(error)
