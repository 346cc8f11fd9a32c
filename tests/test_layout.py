"""The shape of the library: imports go down only, every file says what it is for, and no file grows too long.

Every import counts, whether it stands at the top of a file, inside a function, under `if TYPE_CHECKING:` or in a call
of `import_module` with a literal name: a room that names another knows it, however late it asks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "remap"

FACADE = "remap"
"""`remap/__init__.py`: the names that users see. It may import every room but testing, once it is asked for a name."""

LAYERS = (
    ("cli", "__main__"),
    ("integrations", "torch"),
    ("graphs", "collectives"),
    ("sharing", "observe", "kernels", "residency"),
    ("buffers",),
    ("chunks",),
    ("handles",),
    ("spans", "ranges"),
    ("arrays", "exports", "foreign", "dlpack", "uses", "copies", "streams", "locations"),
    ("drivers",),
    (
        "launches",
        "lifetime",
        "releases",
        "blocks",
        "ends",
        "cards",
        "sites",
        "types",
        "dtypes",
        "sizes",
        "errors",
        "hints",
        "loading",
        "forks",
        "registers",
    ),
)
"""The rooms from top to bottom. A room may import those of lower layers, never its neighbours on the same layer."""

NEIGHBOURS = {
    "__main__": {"cli"},
    "torch": {"integrations"},
    "spans": {"ranges"},
    "arrays": {"exports", "foreign", "dlpack", "uses", "copies", "streams", "locations"},
    "exports": {"uses", "streams", "locations"},
    "foreign": {"dlpack", "uses", "streams", "locations"},
    "uses": {"copies", "streams", "locations"},
    "copies": {"streams", "locations"},
    "streams": {"locations"},
    "lifetime": {"releases", "blocks", "cards", "sites", "types", "errors", "forks"},
    "launches": {"lifetime", "types", "errors", "forks"},
    "ends": {"releases"},
    "releases": {"errors"},
    "cards": {"types", "sizes"},
    "types": {"sizes", "errors"},
    "dtypes": {"errors"},
    "sizes": {"errors"},
}
"""The exceptions: who may import whom within a layer."""

CONCRETE_DRIVERS = ("remap.drivers.cuda", "remap.drivers.host")
OPENER = "remap.drivers"
"""`remap/drivers/__init__.py`, where `open` lives: the one place that decides which driver is loaded."""

TESTING = "testing"
"""The room for those who test a driver: it may import everything, and nothing may depend on it."""

LONGEST = 420
LONGER_FILES: dict[str, str] = {}
"""Files that may be longer, by path within the package, each with the reason."""

DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}


@dataclass(frozen=True)
class Import:
    """One import of something within the package: the module it names, where, and whether it waits to be run."""

    target: str
    line: int
    deferred: bool


def test_imports_go_down_only() -> None:
    """No file imports a room above its own, a neighbour, a concrete driver, or the testing room."""
    modules = modules_of(SOURCE)
    broken = [line for name, path in modules.items() for line in violations(name, path, modules)]
    assert not broken, "\n" + "\n".join(broken)


def test_every_room_has_its_layer() -> None:
    """Each file and folder directly in the package stands in the table of layers."""
    rooms = {room_of(name) for name in modules_of(SOURCE)}
    assert not rooms - DEPTH.keys() - {FACADE, TESTING}, "give the new room a place in LAYERS"


def test_every_module_has_a_docstring() -> None:
    """Each file says at its top what it is for."""
    silent = [path for path in SOURCE.rglob("*.py") if not ast.get_docstring(parse(path))]
    assert not silent, f"without a docstring: {', '.join(map(relative, silent))}"


def test_no_file_is_too_long() -> None:
    """No file has more than 420 lines, but for those that LONGER_FILES gives a reason for."""
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    long = {name: length for name, length in lengths.items() if length > LONGEST and name not in LONGER_FILES}
    assert not long, f"longer than {LONGEST} lines: {long}"


def test_longer_files_are_still_longer() -> None:
    """The table of long files lists none that has become short enough, or has gone."""
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not [name for name in LONGER_FILES if lengths.get(name, 0) <= LONGEST]


# -- the checker, and proof that it sees --


@pytest.mark.parametrize(
    ("importer", "statement", "rule"),
    [
        ("remap.buffers.base", "from remap.handles import Mapping", None),
        ("remap.buffers.base", "from remap.residency import moves", "go down only"),
        ("remap.buffers.base", "from remap.buffers import elastic", None),
        ("remap.buffers.base", "from . import elastic", None),
        ("remap.buffers.base", "from ..residency.moves import pause", "go down only"),
        ("remap.buffers", "from . import elastic", None),
        ("remap.buffers", "from .. import residency", "go down only"),
        ("remap.buffers.base", "def f():\n    import remap.residency", "go down only"),
        ("remap.buffers.base", "if TYPE_CHECKING:\n    import remap.residency", "go down only"),
        ("remap.buffers.base", "import_module('remap.residency')", "go down only"),
        ("remap.buffers.base", "import remap", "facade"),
        ("remap.buffers.base", "from remap import allocate", "facade"),
        ("remap.buffers.base", "import remapped, os.path", None),
        ("remap.sharing.broker", "import remap.observe.snapshot", "neighbours"),
        ("remap.arrays", "import remap.streams", None),
        ("remap.streams", "import remap.arrays", "neighbours"),
        ("remap.locations", "import remap.drivers", None),
        ("remap.locations", "from remap.drivers import host", "drivers.open"),
        ("remap.cli.demo", "import remap.drivers.cuda.memory", "drivers.open"),
        ("remap.cli.demo", "import remap", None),
        ("remap.drivers", "import remap.drivers.cuda", None),
        ("remap.drivers.cuda.memory", "from remap.drivers.cuda import calls", None),
        ("remap.drivers.cuda.memory", "from remap.drivers.host import memory", "drivers.open"),
        ("remap.drivers.protocol", "import remap.types", None),
        ("remap.lifetime", "import remap.errors", None),
        ("remap.errors", "import remap.lifetime", "neighbours"),
        ("remap.types", "import remap.lifetime", "neighbours"),
        ("remap.testing.suite", "import remap.drivers.host, remap.cli", None),
        ("remap.cli.doctor", "import remap.testing", "nothing imports"),
        ("remap", "def __getattr__(name):\n    import remap.graphs", None),
        ("remap", "if TYPE_CHECKING:\n    from remap.graphs import Graph", None),
        ("remap", "import remap.graphs", "waits"),
    ],
)
def test_checker_sees(tmp_path: Path, importer: str, statement: str, rule: str | None) -> None:
    """The checker accepts what the table allows, and names file, line, import and rule where it does not."""
    known = dict.fromkeys(
        ["remap", "remap.buffers", "remap.drivers", "remap.residency", "remap.drivers.host"],
        tmp_path / "__init__.py",
    )
    path = tmp_path / ("__init__.py" if importer in known else "module.py")
    path.write_text(statement)
    found = violations(importer, path, known)
    assert bool(found) == bool(rule)
    for line in found:
        assert line.startswith(f"{path}:{len(statement.splitlines())}: {importer} imports remap")
        assert rule is None or rule in line


def violations(name: str, path: Path, modules: dict[str, Path]) -> list[str]:
    """Return a line for each import of the module `name`, read from `path`, that breaks a rule."""
    found = [(item, broken_rule(name, item)) for item in dict.fromkeys(imports_of(name, path, modules))]
    return [f"{path}:{item.line}: {name} imports {item.target}: {rule}" for item, rule in found if rule]


def broken_rule(importer: str, item: Import) -> str | None:
    """Return the rule that an import breaks, None if it breaks none."""
    source, target = room_of(importer), room_of(item.target)
    if source == TESTING:
        return None
    if target == TESTING:
        return "nothing imports remap.testing"
    for concrete in CONCRETE_DRIVERS:
        if is_within(item.target, concrete) and not is_within(importer, concrete) and importer != OPENER:
            return "only drivers.open imports a concrete driver"
    if source == FACADE:
        # What keeps forks from the first imports must be there before these.
        return (
            None
            if item.deferred or target in (FACADE, "loading")
            else "the facade waits until a name is asked for"
        )
    if source == target or target in NEIGHBOURS.get(source, ()):
        return None
    here, there = DEPTH.get(source, len(LAYERS)), DEPTH.get(target, len(LAYERS))
    if target == FACADE:
        return (
            None
            if here == 0
            else "every room can be reached through the facade, so only the top layer imports it"
        )
    if here == there:
        return f"{source} and {target} are neighbours and do not know each other"
    return f"imports go down only, and {target} stands above {source}" if there < here else None


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Yield every import of the package's own modules in a file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for target in targets_of(node, package, modules):
            if is_within(target, FACADE):
                yield Import(target, getattr(node, "lineno", 0), deferred)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            deferred = True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            deferred = True
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deferred)

    yield from visit(parse(path), False)


def targets_of(node: ast.AST, package: str, modules: dict[str, Path]) -> list[str]:
    """Return the full names of the modules that one statement or call imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parents = package.split(".")
            start = ".".join(parents[: len(parents) - level + 1]) if level else ""
            base = ".".join(part for part in (start, module) if part)
            # `from package import name` imports a module where there is one of that name, else only the package.
            # A room is taken for a module even before its file exists.
            members = [f"{base}.{alias.name}" for alias in names]
            rooms = DEPTH.keys() | {TESTING}
            return [
                full if full in modules or (base == FACADE and room_of(full) in rooms) else base
                for full in members
            ]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(target)), *_],
        ):
            return [target]
        case _:
            return []


def modules_of(source: Path) -> dict[str, Path]:
    """Return the path of each module of the package by its full name."""
    modules: dict[str, Path] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def room_of(module: str) -> str:
    """Return the room that a module stands in: `remap.buffers.base` is in `buffers`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACADE


def is_within(module: str, package: str) -> bool:
    """Tell whether a module is the package or something inside it."""
    return module == package or module.startswith(package + ".")


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def relative(path: Path) -> str:
    """Return a path as it is written within the package."""
    return path.relative_to(SOURCE).as_posix()
