"""The mistakes that programs of several processes make; `mistakes` has the others."""

from __future__ import annotations

from remap.observe.mistake import Mistake

BETWEEN_PROCESSES = (
    Mistake(
        "ForkedError",
        "the object was made before a fork, and this is the child",
        """\
import os
import sys

import remap

memory = remap.allocate("2MiB")
if os.fork() == 0:
    memory.fill(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
""",
        "Memory of a driver belongs to the process that made it; the child's copy of the object is inert.",
        "Make it in the child, or share it: remap.export there, remap.open here. For CUDA, start "
        'processes with multiprocessing.get_context("spawn").',
    ),
    Mistake(
        "ShareError",
        "memory could not be handed to, or taken from, another process",
        """\
import remap

with remap.allocate("2MiB") as memory:
    remap.export(memory)
""",
        "The driver fixes at its creation how an allocation can be shared, and this one was made for "
        "nobody else.",
        'Ask for it then: remap.allocate("2MiB", shareable="posix_fd").',
    ),
    Mistake(
        "BufferNotFoundError",
        "the broker has no buffer of this name",
        """\
import subprocess
import sys

import remap

path = __file__ + ".broker"
serve = [sys.executable, "-m", "remap", "serve", "--path", path]
with subprocess.Popen(serve, stdout=subprocess.PIPE) as broker:
    broker.stdout.readline()
    try:
        remap.connect(path).open("weights")
    finally:
        broker.terminate()
""",
        "Nobody has put it there yet, or it was dropped, or the broker was started anew and had no service manager to "
        "keep its buffers. It is a LookupError as well.",
        "Put it there when this is caught; or wait for it: open(name, wait=seconds).",
    ),
    Mistake(
        "DescriptorError",
        "what is said to describe shared memory does not",
        """\
import remap

remap.open(b"not a descriptor")
""",
        "What comes from another process is checked before it is believed: here it is no descriptor "
        "at all. A descriptor that promises other sizes than the driver finds is refused as well.",
        "Send the bytes of remap.export(…).to_bytes() whole and unchanged, between equal versions of remap.",
    ),
)
"""An object of the parent in a child, and memory that cannot be handed over or is not where it is looked for."""
