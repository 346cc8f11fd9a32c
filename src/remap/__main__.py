"""`python -m remap`: the command `remap`, for where its script is not on the path."""

from __future__ import annotations

from remap.cli import main

if __name__ == "__main__":
    main()
