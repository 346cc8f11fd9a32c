"""Write the newest measured figures into the tables of the documentation.

    python benchmarks/tables.py            # changes the files named in DOCUMENTS

Each table stands between `<!-- figures: NAME -->` and `<!-- end -->`, and is made anew from benchmarks/results. It
needs neither a driver nor remap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NONE = "not measured yet"


def newest(name: str, where: str) -> dict[str, Any] | None:
    """Return the newest results of a benchmark on a machine, by the date in the name; None where there are none.

    Those of a machine with more GPUs (`-x2`) count where there are no others.
    """
    day = "[0-9]" * 4 + "-[0-9][0-9]-[0-9][0-9]"
    found = sorted(RESULTS.glob(f"{name}-{where}-{day}.json")) or sorted(
        RESULTS.glob(f"{name}-{where}-x*-{day}.json")
    )
    return json.loads(found[-1].read_text()) if found else None


def size(count: int) -> str:
    """Return bytes as people write them, a dash for 0."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"
    return f"{count} B" if count else "–"


def dated(results: dict[str, Any]) -> str:
    """Return the line that says where and when figures were measured."""
    about = results["about"]
    return f"Measured on {about['date']}: {about['devices'][0]}, {about['driver_version']}."


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kinds(results: dict[str, Any]) -> str:
    """Return microseconds of a pass by kind and size, and why kinds are missing."""
    passes = results["figures"]["pass_us"]
    names = list(dict.fromkeys(kind for one in passes.values() for kind in one))
    rows = [[kind, *(f"{one[kind]:g}" for one in passes.values())] for kind in names]
    text = table(["one pass, µs", *passes], rows)
    missing = results["figures"]["missing"]
    if missing:
        text += "\n\nNot to be had on that machine: "
        text += "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."
    return text


def releases(results: dict[str, Any]) -> str:
    """Return microseconds of a close."""
    return table(["close, µs", "median"], [[k, f"{v:g}"] for k, v in results["figures"]["close_us"].items()])


def levels(results: dict[str, Any]) -> str:
    """Return size and latency of each level of memory."""
    figures = results["figures"]
    rows = [
        [name, size(count), f"{figures['cycles'].get(name, '–')}", f"{figures['ns'].get(name, '–')}"]
        for name, count in figures["bytes"].items()
    ]
    return table(["level", "size", "latency, cycles", "latency, ns"], rows)


def host_costs(results: dict[str, Any]) -> str:
    """Return what the host driver and its kernels cost, against what they stand for."""
    at, kernels = results["figures"], newest("kernels", "host")
    mapping, live = at["map, set access and unmap, 2 MiB"], at["live mappings"]
    rows = [
        ["`import remap`", f"{at['import remap, s'] * 1000:.0f} ms", "it loads no driver"],
        [
            "map 2 MiB, set access, unmap",
            f"{mapping['driver, µs']:.0f} µs",
            f"{mapping['system calls, µs']:.0f} µs: the system calls alone",
        ],
        *(
            [
                f"look an address up among {count} mappings",
                f"{one['look-up, µs']:.1f} µs",
                f"mappings of the kernel: {one['mappings of the kernel']}",
            ]
            for count, one in live.items()
        ),
    ]
    if kernels is not None:
        found = kernels["figures"]
        rows += [
            [
                "vector add, all checks on",
                f"{found['vector add, million threads/s']:.0f} million threads/s",
                f"{found['ratio to NumPy, processor time']:.2f} of NumPy, by processor time",
            ],
            [
                "gather",
                f"{found['gather, million threads/s']:.0f} million threads/s",
                "each index is checked",
            ],
            [
                "reduction of 256 threads",
                f"{found['reduction of 256, million threads/s']:.1f} million threads/s",
                "its barriers and its shared memory are watched",
            ],
        ]
    return table(["what", "host driver", "beside it"], rows)


# What the README says, a line each: the benchmark ("-x2": on two GPUs), what was done, its figure, and what it is
# measured against.
Line = tuple[str, str, Callable[[Any], str], Callable[[Any], str]]
_SAVER = "torch_memory_saver, with retain_cpu_backup"
_PLAIN_SAVER = "torch_memory_saver, as it comes"
GAINS: tuple[Line, ...] = (
    (
        "residency",
        "pause 8 GiB, contents kept in prepared host memory",
        lambda at: f"{at['8 × 1 GiB']['prepared: GB/s down and up'][0]:.1f} GB/s",
        lambda at: f"{at['link, GB/s']['down']:.1f} GB/s: the link",
    ),
    (
        "residency",
        "resume them",
        lambda at: f"{at['8 × 1 GiB']['prepared: GB/s down and up'][1]:.1f} GB/s",
        lambda at: f"{at['link, GB/s']['up']:.1f} GB/s: the link",
    ),
    (
        "residency",
        "resume 32 layers of 256 MiB: the first can be used after",
        lambda at: f"{at['first of 32 layers, 8 GiB']['first layer, ms']:.1f} ms",
        lambda at: f"{at['first of 32 layers, 8 GiB']['all layers, ms']:.0f} ms: all of them",
    ),
    (
        "torch_memory",
        "put 16 GB of torch tensors to sleep, host memory ready",
        lambda at: f"{at['sleep and wake']['kept']['sleep, GB/s']:.1f} GB/s",
        lambda at: f"{at[_SAVER]['sleep, GB/s']:.1f} GB/s: torch_memory_saver with `retain_cpu_backup`",
    ),
    (
        "torch_memory",
        "wake them at the same addresses",
        lambda at: f"{at['sleep and wake']['kept']['wake, GB/s']:.1f} GB/s",
        lambda at: f"{at[_SAVER]['wake, GB/s']:.1f} GB/s: the same",
    ),
    (
        "torch_memory",
        "put them to sleep, host memory given back each time",
        lambda at: f"{at['sleep and wake']['given back']['sleep, GB/s']:.1f} GB/s",
        lambda at: f"{at[_PLAIN_SAVER]['sleep, GB/s']:.1f} GB/s: torch_memory_saver as it comes",
    ),
    (
        "torch_memory",
        "wake them, host memory given back",
        lambda at: f"{at['sleep and wake']['given back']['wake, GB/s']:.1f} GB/s",
        lambda at: f"{at[_PLAIN_SAVER]['wake, GB/s']:.1f} GB/s: the same",
    ),
    (
        "elastic",
        "grow to 8 GiB in steps of 2 MiB, each step",
        lambda at: f"{at['growth to 8192 MiB in 2 MiB requests']['geometric']['mean']:.1f} µs",
        lambda at: (
            f"{at['growth to 8192 MiB in 2 MiB requests']['raw, µs a request']:.1f} µs: "
            "create, map and set access"
        ),
    ),
    (
        "foundation",
        "vector add on memory made of 2 MiB chunks",
        lambda at: f"{at['vector add']['2 MiB chunks, GB/s']:,.0f} GB/s",
        lambda at: f"{at['vector add']['plain, GB/s']:,.0f} GB/s: on plain `cuMemAlloc` memory",
    ),
    (
        "foundation-x2",
        "vector add on memory striped over two GPUs (NVLink)",
        lambda at: f"{at['vector add']['resident 0 and 1, GB/s']:,.0f} GB/s",
        lambda at: f"{at['vector add']['raw, resident 0 and 1, GB/s']:,.0f} GB/s: mapped by raw calls",
    ),
    (
        "sharing",
        "open 10 GiB of another process, until its first use",
        lambda at: f"{at['open']['remap, from asking to first use, with the journey, ms']:.2f} ms",
        lambda at: (
            f"{at['open']['raw export, import, map, access and use, ms']:.2f} ms: the driver calls alone"
        ),
    ),
)
COSTS: tuple[Line, ...] = (
    (
        "foundation",
        "allocate and close 64 MiB",
        lambda at: f"{at['allocate and close']['64 MiB, µs']['remap']:.0f} µs",
        lambda at: f"{at['allocate and close']['64 MiB, µs']['raw']:.0f} µs: the same calls of cuda-bindings",
    ),
    (
        "foundation",
        "allocate and close 2 MiB",
        lambda at: f"{at['allocate and close']['2 MiB, µs']['remap']:.0f} µs",
        lambda at: f"{at['allocate and close']['2 MiB, µs']['raw']:.0f} µs: the same",
    ),
    (
        "kernels",
        "vector add, the kernel written in Python",
        lambda at: f"{at['vector add']['Python, GB/s']:,.0f} GB/s",
        lambda at: f"{at['vector add']['CUDA C++, GB/s']:,.0f} GB/s: the same kernel in CUDA C++",
    ),
    (
        "kernels",
        "launch a kernel with two arrays",
        lambda at: f"{at['launch with two arrays, µs']['remap, Python kernel']:.1f} µs",
        lambda at: f"{at['launch with two arrays, µs']['cuda.core']:.1f} µs: `launch` of cuda.core",
    ),
    (
        "graphs",
        "launch a graph that allocates, with two buffers",
        lambda at: f"{at['launch']['2 buffers, µs']['remap']:.1f} µs",
        lambda at: f"{at['launch']['2 buffers, µs']['raw']:.1f} µs: `cuGraphLaunch` alone",
    ),
    (
        "torch_memory",
        "put 16 GB of torch tensors to sleep, host memory given back each time",
        lambda at: f"{at['sleep and wake']['given back']['sleep, GB/s']:.1f} GB/s",
        lambda at: f"{at['sleep and wake']['link, GB/s']['down']:.1f} GB/s: the link",
    ),
)
"""What is slower than without remap, and by how much: as much a reason to take it or leave it as the rest."""


def readme(where: str, lines: tuple[Line, ...]) -> str:
    """Return the lines whose benchmarks have run on a machine."""
    runs = {
        name: newest(name.removesuffix("-x2"), f"{where}-x2" if name.endswith("-x2") else where)
        for name in dict.fromkeys(line[0] for line in lines)
    }
    rows = [
        [what, own(run["figures"]), beside(run["figures"])]
        for name, what, own, beside in lines
        if (run := runs[name]) is not None
    ]
    return table(["what", "remap", "to compare"], rows)


TABLES = {
    "kinds-h200": ("typed", "h200", kinds),
    "kinds-host": ("typed", "host", kinds),
    "releases-h200": ("typed", "h200", releases),
    "releases-host": ("typed", "host", releases),
    "levels-h200": ("hierarchy", "h200", levels),
    "costs-host": ("host_driver", "host", host_costs),
    "gains-h200": ("foundation", "h200", lambda _: readme("h200", GAINS)),
    "costs-h200": ("foundation", "h200", lambda _: readme("h200", COSTS)),
}
DOCUMENTS = (
    "README.md",
    "docs/memory-kinds.md",
    "docs/memory-hierarchy.md",
    "docs/explain/host-driver.md",
)


def filled(text: str) -> str:
    """Return a document with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        name, where, make = TABLES[match[1]]
        results = newest(name, where)
        body = NONE if results is None else f"{make(results)}\n\n{dated(results)}"
        return f"<!-- figures: {match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- figures: (\S+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Fill the documents."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
