"""What `import remap` costs."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

import remap

LIMIT = 0.15
HEAVY = ("click", "cuda", "cupy", "mpi4py", "numba", "numpy", "rich", "torch")


def seconds(statement: str) -> float:
    """Return how long a fresh interpreter takes for one statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


@pytest.mark.alone
def test_import_is_quick() -> None:
    """`import remap` takes less than 0.15 s more than an interpreter that does nothing (the best of seven each)."""
    extra = min(seconds("import remap") for _ in range(7)) - min(seconds("pass") for _ in range(7))
    assert extra < LIMIT, f"import remap takes {extra * 1000:.0f} ms, the limit is {LIMIT * 1000:.0f} ms"


@pytest.mark.parametrize("statement", ["import remap", "import remap; dir(remap); remap.__version__"])
def test_import_loads_nothing_heavy(statement: str) -> None:
    """`import remap` loads neither a driver nor any package that would make it slow; nor does looking around."""
    script = f"{statement}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    printed = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert not set(HEAVY) & set(printed.split())


def test_import_opens_no_driver() -> None:
    """`import remap` does not load the module of a concrete driver."""
    script = "import remap, sys; print(*(name for name in sys.modules if name.startswith('remap.')))"
    printed = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert not [
        name for name in printed.split() if name.startswith(("remap.drivers.cuda", "remap.drivers.host"))
    ]


def test_modules_that_go_by_a_short_name() -> None:
    """`import remap.torch` and the attribute are one module."""
    script = (
        "import remap\ntry:\n  import remap.torch as a\n"
        "except ImportError as e: print(e)\nelse: print(a is remap.torch)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n" or "pip install torch" in done.stdout


WITHOUT_TORCH = """
import inspect, pydoc, sys
sys.modules["torch"] = None  # nobody can import it now
import remap
assert not hasattr(remap, "torch")
found = dict(inspect.getmembers(remap))
assert "allocate" in found and "torch" not in found
assert "ElasticBuffer" in pydoc.render_doc(remap)
try:
    import remap.torch
except ImportError as error:
    print(error)
try:
    from remap import torch
except ImportError as error:
    print(error)
try:
    remap.torch
except AttributeError as error:
    print(error)
"""


def test_looking_around_without_torch() -> None:
    """Help and `hasattr` work without torch; imports are an ImportError, and the attribute an AttributeError."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said == said[:1] * 3
    assert re.search("needs torch, which cannot be imported .*pip install torch numba", said[0])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("alocate", "did you mean remap.allocate?"),
        ("nothing.like.it", ""),
        ("_private", ""),
    ],
)
def test_what_does_not_exist_is_an_attribute_error(name: str, hint: str) -> None:
    """A name that does not exist, or is no name at all, is an AttributeError, with what may have been meant."""
    with pytest.raises(AttributeError, match=f"has no attribute '{re.escape(name)}'(; )?{re.escape(hint)}$"):
        getattr(remap, name)


def test_a_module_that_was_not_imported_is_named() -> None:
    """A module's name, before anything has imported it, is an AttributeError that says how; tests import most."""
    done = subprocess.run(
        [sys.executable, "-c", "import remap; remap.handles"], check=False, capture_output=True, text=True
    )
    assert "AttributeError" in done.stderr
    assert "it is a module of its own: import remap.handles" in done.stderr
