"""Compile the kernels that are shipped with remap to PTX: `python tools/build_kernels.py`.

PTX of an old architecture and an old language version, so that every driver takes it and compiles it for its device;
NVRTC writes the newest version that it knows, which older drivers refuse.
"""

from __future__ import annotations

import re
from pathlib import Path

from remap import kernels

ARCHITECTURE = "compute_75"  # the oldest that the newest NVRTC compiles for
LANGUAGE = "6.3"  # the PTX version that introduced it


def main() -> None:
    """Write one PTX file beside each source file."""
    for path in sorted((Path(kernels.__file__).parent / "cuda").glob("*.cu")):
        image = kernels.compile(path.read_text(), arch=ARCHITECTURE, name=path.name)
        text = portable(image.data.decode(), path.name)
        path.with_suffix(".ptx").write_text(text)
        print(f"{path.stem}.ptx: {ARCHITECTURE}, PTX {LANGUAGE}, {len(text)} bytes")  # noqa: T201 (a script)


def portable(ptx: str, name: str) -> str:
    """Lower the language version, and name the source where NVRTC names its own build."""
    ptx = re.sub(r"\A(?://[^\n]*\n)+", f"// Made from {name} by tools/build_kernels.py; do not edit.\n", ptx)
    ptx, count = re.subn(r"^\.version \d+\.\d+$", f".version {LANGUAGE}", ptx, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{name}: expected one .version line, found {count}")
    return ptx.rstrip() + "\n"


if __name__ == "__main__":
    main()
