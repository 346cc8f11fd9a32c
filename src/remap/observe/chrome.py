"""Traces as files: the JSON that Perfetto and chrome://tracing read, written and read back.

Driver calls are complete events on the threads that made them, operations on buffers and the lives of objects are
asynchronous spans, and the bytes of each location are counters. Source: Trace Event Format (Google).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from remap.drivers.wrappers import CUDA_FUNCTIONS
from remap.errors import InvalidValueError
from remap.observe.calls import CallRecord, as_value
from remap.observe.ledger import Ledger
from remap.observe.reading import (
    Fields,
    FileLike,
    check_list,
    check_number,
    check_text,
    parse_json,
    read_text,
)

if TYPE_CHECKING:
    from remap.observe.trace import Trace

FORMAT, VERSION = "remap trace", 1


def to_json(trace: Trace) -> str:
    """Return a trace as JSON text."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "started": trace.started,
        "driver": "" if trace.driver is None else trace.driver.name,
        "left_out": trace.left_out,
        "contexts": [[context, device] for context, device in trace.contexts.items()],
    }
    events = list(_events(trace))
    return json.dumps(
        {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events},
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    process, start = os.getpid(), trace.start
    yield _named("process_name", process, 0, "remap")
    records = trace._records.copy()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread in dict.fromkeys(record[7] for record in records):
        yield _named("thread_name", process, thread, names.get(thread, f"thread {thread}"))
    ledger = Ledger(trace.before, trace.contexts, trace.handles)
    if ledger.bytes:
        yield _counter(process, 0, ledger)
    for record in records:
        yield _call(record, process, start)
        if ledger.take(record):
            yield _counter(process, record[5] + record[6] - start, ledger)
    yield from _spans(trace, process)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _call(record: CallRecord, process: int, start: int) -> dict[str, Any]:
    name, arguments, keywords, result, error, begun, duration, thread = record
    said: dict[str, Any] = {
        "method": name,
        "arguments": as_value(arguments),
        "result": as_value(result),
    }
    if keywords:
        said["keywords"] = as_value(keywords)
    if error is not None:
        said["error"] = error
    return {
        "name": CUDA_FUNCTIONS.get(name, name),
        "cat": "driver",
        "ph": "X",
        "ts": (begun - start) / 1000,
        "dur": duration / 1000,
        "pid": process,
        "tid": thread,
        "args": said,
    }


def _counter(process: int, at: int, ledger: Ledger) -> dict[str, Any]:
    values = {str(place): size for place, size in sorted(ledger.bytes.items())}
    return {"name": "footprint", "ph": "C", "ts": at / 1000, "pid": process, "tid": 0, "args": values}


def _spans(trace: Trace, process: int) -> Iterator[dict[str, Any]]:
    """Yield the lives of objects and what was done with them, as pairs of events that share an id."""
    open_spans: dict[tuple[int, int, str], list[str]] = {}
    lives = {item.serial: f"{item.kind} {item.serial}" for item in trace.before}
    for serial, name in lives.items():
        yield _span("b", "object", name, f"o{serial}", 0, process, 0)
    for number, (what, kind, serial, doing, at, thread) in enumerate(trace.notes):
        when, name = at - trace.start, f"{kind} {serial}"
        if what == "made":
            lives[serial] = name
            yield _span("b", "object", name, f"o{serial}", when, process, thread)
            continue
        spans = open_spans.setdefault((thread, serial, doing), [])
        if what == "begin":
            spans.append(f"n{number}")
            yield _span("b", "buffer", f"{doing}: {name}", spans[-1], when, process, thread)
        elif spans:
            yield _span("e", "buffer", f"{doing}: {name}", spans.pop(), when, process, thread)
            if doing == "close" and lives.pop(serial, ""):
                yield _span("e", "object", name, f"o{serial}", when, process, thread)
    end = max(trace.stop - trace.start, 0)
    for (thread, serial, doing), spans in open_spans.items():
        for span in spans:
            yield _span("e", "buffer", f"{doing}: {lives.get(serial, serial)}", span, end, process, thread)
    for serial, name in lives.items():
        yield _span("e", "object", name, f"o{serial}", end, process, 0)


def _span(phase: str, kind: str, name: str, ident: str, at: int, process: int, thread: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": phase,
        "id": ident,
        "ts": at / 1000,
        "pid": process,
        "tid": thread,
    }


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One driver call as a file says it was; times are in µs since the trace began."""

    method: str
    arguments: tuple[Any, ...]
    result: Any
    error: str
    start: float
    duration: float
    thread: int


@dataclass(frozen=True, slots=True)
class ReadTrace:
    """What a trace file holds of a run: its driver calls in the order in which they began."""

    driver: str
    started: str
    left_out: int
    contexts: dict[int, int]
    calls: tuple[ReadCall, ...]


def read(path: FileLike) -> ReadTrace:
    """Read a trace file of up to 256 MiB; raises `InvalidValueError` naming what is wrong with it."""
    what = f"trace {path}"
    whole = parse_json(read_text(path, "trace"), what)
    if not isinstance(whole, dict) or "traceEvents" not in whole or "otherData" not in whole:
        raise InvalidValueError(
            what, rule="it is not a trace of remap", next_step="remap.trace(path) writes one"
        )
    about = Fields(whole["otherData"], what)
    if about.text("format") != FORMAT or about.number("version") != VERSION:
        raise InvalidValueError(
            what,
            rule=f"this remap reads {FORMAT!r} of version {VERSION}",
            next_step="Read it with the remap that wrote it",
        )
    pairs = about.each("contexts", lambda entry, said: check_list(entry, said, 2))
    contexts = {check_number(context, what): check_number(device, what) for context, device in pairs}
    events = check_list(whole["traceEvents"], what)
    calls = [_read_call(event, f"{what}: event {at}") for at, event in enumerate(events) if _is_call(event)]
    calls.sort(key=lambda call: call.start)
    return ReadTrace(
        about.text("driver"), about.text("started"), about.number("left_out"), contexts, tuple(calls)
    )


def _is_call(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    found = cast("dict[str, Any]", event)
    return found.get("cat") == "driver" and found.get("ph") == "X"


def _read_call(event: dict[str, Any], what: str) -> ReadCall:
    said = Fields(event.get("args"), what)
    arguments = said.each("arguments", lambda entry, _: entry)
    error = event["args"].get("error")
    times = [event.get(name) for name in ("ts", "dur")]
    if not all(isinstance(time, int | float) and time >= 0 for time in times):
        raise InvalidValueError(what, rule="its times are not numbers from 0 on")
    return ReadCall(
        said.text("method"),
        arguments,
        event["args"].get("result"),
        "" if error is None else check_text(error, what),
        float(times[0] or 0),
        float(times[1] or 0),
        check_number(event.get("tid"), what),
    )
