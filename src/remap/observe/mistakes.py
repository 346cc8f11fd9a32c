"""One small broken program for each public error, with cause and cure: for `remap explain` and the documentation.

The programs run on the host driver, where no GPU is needed; the tests run each of them, and see that it raises what it
is to explain.
"""

from __future__ import annotations

from difflib import get_close_matches

from remap.errors import CudaResult, InvalidValueError, driver_error
from remap.observe.mistake import Mistake
from remap.observe.mistakes_between import BETWEEN_PROCESSES

_ALL = (
    Mistake(
        "RemapError",
        "the root of all errors of remap",
        """\
import remap

remap.allocate("12 parsecs")
""",
        "Every error of remap is one: this one is an InvalidValueError. Its message says what was "
        "asked, the rule, and the next step; the three are attributes, too (asked, rule, next_step).",
        "Catch the particular error where you can do something about it, and RemapError at the edge "
        "of a program.",
    ),
    Mistake(
        "InvalidValueError",
        "an argument has a value that no call could take",
        """\
import remap

remap.device(99)
""",
        "The value itself is wrong, whatever the state of the program: a device that does not exist, "
        "a negative size, text that is no size. It is a ValueError, too.",
        "Read the rule in the message; remap.devices() lists the devices.",
    ),
    Mistake(
        "AlignmentError",
        "a size, an offset or an alignment does not fit the granularity",
        """\
import remap

remap.create(1000)
""",
        "A physical allocation is made of whole granules (2 MiB), as the driver maps nothing smaller."
        " remap.create is strict, since its sizes must add up inside a reservation.",
        "Use one of the sizes that the message names, or remap.allocate, which rounds up.",
    ),
    Mistake(
        "ClosedError",
        "the object was closed before",
        """\
import remap

with remap.allocate("2MiB") as memory:
    memory.fill(1)
memory.fill(2)
""",
        "The with block gave the memory back. The object owns nothing any more, and its address may "
        "be someone else's.",
        "Use it inside of the block, or close it later.",
    ),
    Mistake(
        "InUseError",
        "something else still uses the object",
        """\
import remap

allocation = remap.create("2MiB")
addresses = remap.reserve("4MiB")
mapping = addresses.map(allocation, access={0: "rw"})
addresses.close()
""",
        "Addresses with a mapping in them cannot be freed: whoever uses the mapping would be left "
        "without them. The same error ends a second operation that would take memory away under a "
        "first one.",
        "Close the mappings first (mapping.close()), or let the other operation end. Nothing has "
        "changed meanwhile.",
    ),
    Mistake(
        "AccessError",
        "the location has no such right to this memory",
        """\
import remap

with remap.allocate("2MiB", access="r") as memory:
    memory.fill(1)
""",
        "Rights are those that were asked for, and no more: nobody may write here. Locations that "
        "were not named have no access at all.",
        'Grant it when the memory is mapped (access="rw"), or later: memory.set_access({0: "rw"}).',
    ),
    Mistake(
        "ExportError",
        "memory cannot be handed to another library in this way",
        """\
import numpy
import remap

with remap.allocate("2MiB") as memory:
    numpy.from_dlpack(memory.array("float32"))
""",
        "NumPy works on the CPU, which may not look into memory of a device. It is a BufferError, too, as "
        "the protocols between libraries ask for.",
        "Copy it with to_host(), hand it to a library that works on the device, or keep it on remap.Host().",
    ),
    Mistake(
        "SizeOverflowError",
        "the extents of an array multiply to more bytes than there are addresses",
        """\
import remap

remap.DeviceBuffer.empty((1 << 40, 1 << 40))
""",
        "No address space holds so many bytes, so the shape is a mistake. It is an OverflowError, too.",
        "Look at the shape in the message: often two extents were meant to be one.",
    ),
    Mistake(
        "PausedError",
        "no memory stands behind the address at the moment",
        """\
import remap

with remap.allocate("2MiB") as memory:
    remap.pause(memory)
    memory.fill(1)
""",
        "The buffer sleeps: it has kept its address, and given its memory back.",
        "remap.resume(memory) first.",
    ),
    Mistake(
        "LaunchError",
        "a kernel cannot be launched like this",
        """\
import remap

@remap.kernel
def double(out: remap.DisjointSlice):
    i = remap.index_1d()
    out[i] = out[i] * 2

with remap.DeviceBuffer.zeroed(64) as x:
    double.launch(x, grid=(8, 8), block=8)
""",
        "The configuration or an argument does not fit the kernel; nothing was launched. Here a "
        "kernel that counts its threads in one dimension was given a grid of two.",
        "Read the rule in the message: it names the argument or the limit.",
    ),
    Mistake(
        "KernelError",
        "a kernel did what a GPU would do wrongly in silence",
        """\
import remap

@remap.kernel
def collide(out: remap.DisjointSlice):
    i = remap.index_1d()
    remap.unchecked(out)[i // 2] = 1.0

with remap.DeviceBuffer.zeroed(64) as x:
    collide.launch(x, grid=1, block=64)
    x.to_host()
""",
        "Two threads write one element. The host driver sees it, and reports it at the next wait; a "
        "GPU would let either of them win. The same error reports reads beyond an array and barriers "
        "that not all threads reach.",
        "Let each thread write its own element: out[i] of a DisjointSlice cannot do otherwise.",
    ),
    Mistake(
        "CompileError",
        "a kernel's source cannot be compiled",
        """\
import remap

@remap.kernel
def kernel(out: remap.DisjointSlice):
    i = remap.index_1d()
    out[i] = open("file")

with remap.DeviceBuffer.zeroed(64) as x:
    kernel.launch(x, grid=1, block=64)
""",
        "Kernels in Python are a small part of Python: numbers, arrays, loops, conditions and remap's"
        " own words.",
        "The message names the line and the rule. For CUDA C++ it carries the compiler's log.",
    ),
    Mistake(
        "DriverError",
        "the driver refused a call",
        """\
import remap

remap.driver().release(12345)
""",
        "The base of all refusals of the driver; call, name and code say which. Raw driver calls, as "
        "here, check nothing beforehand; remap's objects cannot make such a call.",
        "Look the name up in the driver's documentation; `remap trace --as c` shows the calls before it.",
    ),
    Mistake(
        "OutOfMemoryError",
        "physical memory ran out",
        """\
import remap

remap.create("1TiB")
""",
        "The location has not as much free memory. The message says what was asked and what is free; "
        "memory that other processes use counts, too. It is a MemoryError as well.",
        "Close, pause or trim something there: print(remap.snapshot()) shows who holds what, "
        "print(remap.leaks()) where it was made.",
    ),
    Mistake(
        "OutOfAddressSpaceError",
        "addresses ran out, and not memory",
        """\
import remap

remap.reserve("256TiB")
""",
        "A process has 128 TiB of addresses at most. The host driver raises it, too, when the "
        "kernel's table of mappings (vm.max_map_count) is nearly full.",
        "Reserve less, or raise the limit that `remap doctor` names.",
    ),
    Mistake(
        "NotSupportedError",
        "the device, the driver or the platform cannot do this",
        """\
import remap

remap.device(0).require("win32")
""",
        "The capability that is missing is the error's attribute `capability`; the message says why "
        "it is missing.",
        "`remap doctor` names the cure for each, where there is one.",
    ),
    Mistake(
        "NotPermittedError",
        "the driver could do this, but this process may not",
        """\
import remap
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult

# What a machine without an IMEX channel answers; the host driver has no such rule.
driver = Faulty(remap.driver())
remap.use(driver)
driver.fail("create", result=CudaResult.NOT_PERMITTED)
remap.create("2MiB", shareable="posix_fd")
""",
        "Fabric handles need an IMEX channel that an administrator grants, and both ends need the same one.",
        '`remap doctor` says how to make one. On one machine shareable="posix_fd" serves as well.',
    ),
    Mistake(
        "IllegalAddressError",
        "a kernel touched an address that its device may not",
        """\
from types import SimpleNamespace

import remap
from remap.types import LaunchConfig

def stray(launch):
    launch.read(0x1000, 4)

nothing = SimpleNamespace(pointers=0, values=())

device = remap.device(0)
with device.current():
    remap.driver().launch(stray, LaunchConfig((1, 1, 1), (1, 1, 1)), 0, nothing, None)
    device.synchronize()
""",
        "The memory was unmapped, or the device has no right to it, when the kernel ran. The context "
        "is lost for this process, as on a GPU; the wait reports it, and has not caused it.",
        "End the process. Look for memory that was closed with after=None, and for addresses that "
        "outlived their buffer; compute-sanitizer names the line of the kernel.",
    ),
    Mistake(
        "ContextLostError",
        "the context is lost to an earlier fault",
        """\
import remap
from remap.drivers.wrappers import Faulty
from remap.errors import CudaResult

# What a device assertion in a kernel answers to whoever waits next.
driver = Faulty(remap.driver())
remap.use(driver)
driver.fail("synchronize_context", result=CudaResult.ASSERT)
remap.device(0).synchronize()
""",
        "A kernel failed for good: it ran into an assertion, or the hardware did. From then on every "
        "call answers so; this one reports it, and has not caused it.",
        "End the process. Closing objects afterwards is silent, so that with blocks still end.",
    ),
    Mistake(
        "DriverNotFoundError",
        "no driver could be opened",
        """\
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import remap

remap.use("cuda")
""",
        "The message and `attempts` list each driver that was tried, with its reason.",
        "`remap doctor` names the cure. Without a name, remap takes the host driver where CUDA is not"
        " to be had.",
    ),
    *BETWEEN_PROCESSES,
    Mistake(
        "DiskError",
        "a backup could not be written to, or read from, a file",
        """\
import remap

with remap.allocate("2MiB") as memory:
    remap.pause(memory, keep="disk", directory="/nowhere")
""",
        "The directory does not exist, or has not enough free space. The buffer is as it was.",
        "Free space there, or name another directory=.",
    ),
    Mistake(
        "RemapWarning",
        "a clean-up failed where no error could be raised",
        """\
import remap
from remap.drivers.wrappers import Faulty

driver = Faulty(remap.driver())
remap.use(driver)
memory = remap.create("2MiB")
driver.fail("release")
del memory
remap.collect()
""",
        "The object was collected unclosed (a ResourceWarning says so), and giving its memory back "
        "failed afterwards: nobody was there to catch an error.",
        "Close objects, or use them in with statements: then the failure is an error, at a place that"
        " you know.",
    ),
)

MISTAKES = {one.name: one for one in _ALL}
"""Each public error by name."""


def find(name: str) -> Mistake:
    """Return the mistake of an error by its name, in any case and with or without `Error`, or by that of CUDA's result.

    Messages have CUDA's name and number at their end; a result is raised as one and the same error by every call but
    that which reserves addresses.
    """
    known = {key.lower(): one for key, one in MISTAKES.items()}
    asked = name.lower().removeprefix("remap.")
    results = {key: one for one in CudaResult for key in (f"cuda_error_{one.name.lower()}", str(int(one)))}
    if asked in results:
        asked = type(driver_error("", results[asked])).__name__.lower()
    found = known.get(asked) or known.get(f"{asked}error")
    if found is None:
        near = get_close_matches(asked, known, n=1, cutoff=0.5)
        raise InvalidValueError(
            f"error {name!r}",
            rule="remap raises no error of that name",
            next_step=f"Did you mean {known[near[0]].name}?" if near else "remap explain lists them all",
        )
    return found
