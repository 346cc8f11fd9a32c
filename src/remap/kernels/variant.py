"""One kernel for one combination of types: checked, packed and launched without looking at types again."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remap.errors import AccessError, LaunchError
from remap.kernels import ir
from remap.kernels.again import Packed, Repeatable
from remap.kernels.arguments import View, view_of
from remap.kernels.cpp import Writer, captured_layout, is_empty
from remap.kernels.host import HostWriter
from remap.kernels.ir import Array, Record, Scalar, Type
from remap.kernels.loaded import Loaded
from remap.kernels.overlap import Place, check_disjoint, parts_of, share_bytes
from remap.kernels.params import Arguments
from remap.kernels.reading import MISSING, Reference, Source, is_same, reader, type_of_value
from remap.kernels.run import HostRun, Parts
from remap.kernels.structures import alignment, as_record, describe_layout, misfit
from remap.kernels.widths import check_width, is_argument, widths_of
from remap.locations import Device
from remap.ranges import Range
from remap.spans import Span
from remap.streams import StreamLike
from remap.types import Access, LaunchConfig, Touched

_NONE = Access.NONE
_CODES = {
    **{f"i{size}": code for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))},
    **{f"u{size}": code for size, code in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))},
    "f4": "f",
    "f8": "d",
    "b1": "?",
}


class Variant:
    """A typed kernel, what it becomes on each driver, and how its arguments are passed."""

    def __init__(
        self, source: Source, kernel: ir.Kernel, resolved: dict[Reference, Any], functions: Sequence[Source]
    ) -> None:
        self.kernel = kernel
        self.loaded: dict[Device, Loaded] = {}
        self._source = source
        self._resolved = resolved
        self._functions = functions
        self._cpp: str | None = None
        self._host: Callable[..., None] | None = None
        self._free: list[Arguments] = []
        self.asked = f"launch of {kernel.name}"
        # Whether anything from outside of the kernel has a part in it, which is then looked at before each launch.
        outside = [*resolved, *(reference for _, reference, _ in kernel.captured)]
        self.looks_outside = bool(outside)
        self._taken_in = reader(outside, functions)
        self._arrays = [
            (index, name[2:], kind.kind == "disjoint", kind.ndim)
            for index, (name, kind) in enumerate(kernel.parameters)
            if isinstance(kind, Array)
        ]
        self.written = [index for index, _, written, _ in self._arrays if written]
        self._meets = bool(self.written)
        self._layout, self._offsets, self._rows = self._lay_out()
        self._struct = struct.Struct(self._layout)
        self._plain = (
            all(not isinstance(kind, Record) for _, kind in kernel.parameters) and not kernel.captured
        )
        self._widths = widths_of(kernel, source)

    # -- what it becomes --

    def fits(self) -> bool:
        """Tell whether what was compiled in is still meant, and what is captured now has the types that it had."""
        for reference, found in self._resolved.items():
            if not is_same(reference.now(), found):
                return False
        # A function may be given another body in its place, as `%autoreload` does.
        if any(one.function.__code__ is not one.code for one in self._functions):
            return False
        return all(type_of_value(reference.now()) == kind for _, reference, kind in self.kernel.captured)

    def cpp(self) -> str:
        """Return the kernel as CUDA C++."""
        if self._cpp is None:
            with self._source.shallow():
                self._cpp = Writer(self.kernel).text()
        return self._cpp

    def host(self) -> Callable[..., None]:
        """Return the kernel as a function over NumPy arrays."""
        found = self._host
        if found is None:
            with self._source.shallow():
                found = self._host = HostWriter(self.kernel).compiled()
        return found

    def load(self, at: Device) -> Loaded:
        """Return the kernel on a device."""
        found = self.loaded.get(at)
        if found is None:
            found = self.loaded.setdefault(at, Loaded(self, at))
        return found

    # -- checks --

    def views(self, arguments: tuple[Any, ...], stream: StreamLike | None) -> dict[int, View]:
        """Return the array arguments by their places."""
        return {
            index: view_of(arguments[index], self.asked, name, stream) for index, name, _, _ in self._arrays
        }

    def check_arrays(
        self,
        views: dict[int, View],
        arguments: tuple[Any, ...],
        at: Device,
        config: LaunchConfig,
        allow_overlap: bool,
    ) -> None:
        """Raise where an array cannot be written, shares memory with one that is, or is not as wide as its index."""
        place = at.location
        for index, _, written, _ in self._arrays:
            view = views[index]
            owner = view.owner
            if owner is None:
                if written and not view.writable:
                    self._refuse_write(index, view, at)
                if view.host is not None:
                    self._check_reach(index, at)
                continue
            if not owner._open:
                owner._check()
            if written and not owner._rights.get(place, _NONE).writable:
                self._refuse_write(index, view, at)
            if type(owner)._check_part is not Range._check_part and owner._open:  # its parts differ
                needed = Access.READ_WRITE if written else Access.READ
                with owner._driver.lock:
                    owner._check_part(self.asked, view.address - owner._address, _size(view), needed, place)
        if self._meets and len(views) > 0 and not allow_overlap:
            check_disjoint(self.asked, self.places(views))
        for index, space, written, width in self._widths:
            what = f"{self.asked}, argument {self.kernel.parameters[index][0][2:]!r}"
            verb = f"{'written' if written else 'read'} with {space}"
            check_width(what, verb, width(arguments, views, config), views[index].shape)

    def places(self, views: dict[int, View]) -> list[Place]:
        """Return where the arrays lie."""
        return [
            Place(name, views[index].owner, views[index].address, _size(views[index]), written)
            for index, name, written, _ in self._arrays
        ]

    def _check_reach(self, index: int, at: Device) -> None:
        """Raise where a device cannot reach memory of the host through the host's own page tables (D8)."""
        if not at.capabilities["hmm"] and not at.capabilities["ats"]:
            name = self.kernel.parameters[index][0][2:]
            raise LaunchError(
                f"{self.asked}, argument {name!r}: memory of the host",
                rule=f"{at} reaches it with HMM or ATS only, and has neither ({at.capabilities['hmm'].reason})",
                next_step="Copy it: remap.DeviceBuffer.from_host(array); or use pinned or managed memory",
            )

    def _refuse_write(self, index: int, view: View, at: Device) -> None:
        name = self.kernel.parameters[index][0][2:]
        if view.owner is not None:
            view.owner._check()
        what, step = "the array", "Pass one that may be written"
        if view.owner is not None:
            what = str(view.owner.describe())
            step = view.owner._grant_step(at.location, Access.READ_WRITE)
        raise AccessError(
            f"{self.asked}, argument {name!r}",
            rule=f"a DisjointSlice is written, and {at} may not write to {what}",
            next_step=f"{step}; or annotate the parameter as remap.Slice, if it is only read",
        )

    # -- passing --

    def repeatable(self, arguments: tuple[Any, ...]) -> Repeatable | None:
        """Return what a repeated launch has to look at.

        None where an array is not ours, where anything but numbers goes by value, since what is inside of it can
        change, and where a number is a width that arrays are checked against.
        """
        if not all(isinstance(kind, Scalar) for _, _, kind in self.kernel.captured):
            return None
        if any(is_argument(one.width) for one in self._widths):
            return None
        found: list[Packed] = []
        places = [index for index, _, _, _ in self._arrays]
        if not all(isinstance(getattr(arguments[one], "owner", None), Span) for one in places):
            return None
        start, value = 8 * len(self._offsets), 0  # pointers first, then values
        for index, (_, kind) in enumerate(self.kernel.parameters):
            if isinstance(kind, Array):
                value += 2 + len(kind.axes)
                continue
            if not isinstance(kind, Scalar):
                return None
            layout = struct.Struct(_CODES[f"{kind.dtype.kind}{kind.dtype.itemsize}"])
            given: Any = arguments[index]
            found.append((index, given.__class__, layout, start + self._offsets[value]))
            value += 1
        if not self.looks_outside:
            return Repeatable(places, found)
        return Repeatable(places, found, self._taken_in, tuple(self._taken_in()))

    def _lay_out(self) -> tuple[str, list[int], list[tuple[int, int, str]]]:
        """Return the layout of all values for `struct`, where each begins, and (offset, size, what) for people."""
        codes: list[tuple[str, int, str]] = []
        for name, kind in self.kernel.parameters:
            if isinstance(kind, Array):
                elements = f"{name[2:]}: number of elements ({kind.dtype})"
                codes += [("P", 8, f"{name[2:]}: address"), ("q", 8, elements)]
                codes += [("q", 8, f"{name[2:]}: extent {axis}") for axis in kind.axes]
            elif isinstance(kind, Scalar):
                code = _CODES[f"{kind.dtype.kind}{kind.dtype.itemsize}"]
                codes.append((code, kind.dtype.itemsize, f"{name[2:]}: {kind.dtype}"))
            elif isinstance(kind, Record) and not is_empty(kind):
                codes.append((f"{kind.dtype.itemsize}s", alignment(kind.dtype), f"{name[2:]}: structure"))
        layout = captured_layout(self.kernel)
        if layout is not None:
            codes.append((f"{layout.itemsize}s", alignment(layout), "captured values"))
        text = ""
        offsets: list[int] = []
        rows: list[tuple[int, int, str]] = []
        for code, unit, what in codes:
            text += f"{-struct.calcsize(text) % unit}x"  # `struct` aligns numbers, and not bytes
            offsets.append(struct.calcsize(text))
            text += code
            rows.append((offsets[-1], struct.calcsize(code), what))
        return text, offsets, rows

    def describe(self) -> str:
        """Return how the arguments are passed, a line for each value."""
        lines = ["offset  size  value"]
        paths = {name: self._path(reference) for name, reference, _ in self.kernel.captured}
        for offset, size, what in self._rows:
            lines.append(f"{offset:>6} {size:>5}  {what}")
            name = what.split(":")[0]
            kind = dict(self.kernel.parameters).get(f"p_{name}")
            if isinstance(kind, Record):
                lines += describe_layout(kind.dtype, 0, "         ")
        layout = captured_layout(self.kernel)
        if layout is not None:
            for line in describe_layout(layout, 0, "         "):
                head, _, name = line.rpartition(" ")
                lines.append(f"{head} {paths.get(name, name)}")
        lines += [
            f"     -     0  {name[2:]}: no bytes, so it vanishes"
            for name, kind in self.kernel.parameters
            if is_empty(kind)
        ]
        return "\n".join(lines)

    def pack(self, arguments: tuple[Any, ...], views: dict[int, View]) -> Arguments:
        """Return the arguments as bytes for cuLaunchKernel; `give_back` follows."""
        raw: list[Any] = []
        for index, (name, kind) in enumerate(self.kernel.parameters):
            if isinstance(kind, Array):
                view = views[index]
                raw.append(view.address)
                raw.append(_count(view.shape))
                raw.extend(view.shape[axis] for axis in kind.axes)
            elif isinstance(kind, Scalar):
                raw.append(self.number(name, kind, arguments[index]))
            elif not is_empty(kind):
                raw.append(self._by_value(name, kind, arguments[index]).tobytes())
        if self.kernel.captured:
            raw += self._captured_bytes()
        try:
            packed = self._free.pop()  # one step under the GIL: no two threads get the same one
        except IndexError:
            packed = Arguments(self._free, self._offsets, self._struct.size)
        self._struct.pack_into(packed.content, packed._start, *raw)
        packed.spans = tuple([view.owner for view in views.values() if view.owner is not None])
        if len(packed.spans) < len(views):
            packed.host = tuple(view.host for view in views.values() if view.host is not None)
        return packed

    def _captured_bytes(self) -> list[bytes]:
        layout = captured_layout(self.kernel)
        if layout is None:
            return []
        record = np.zeros((), layout)
        for (name, _, kind), value in zip(self.kernel.captured, self._captured(), strict=True):
            if not is_empty(kind):
                record[name] = self._by_value(name, kind, value)
        return [record.tobytes()]

    def _captured(self) -> list[Any]:
        values = [reference.now() for _, reference, _ in self.kernel.captured]
        for value, (_, reference, _) in zip(values, self.kernel.captured, strict=True):
            if value is MISSING:
                raise LaunchError(self.asked, rule=f"the captured value {self._path(reference)} is gone")
        return values

    def _path(self, reference: Reference) -> str:
        """Return a captured value as people know it: with the function that reads it, where that is not the kernel."""
        return (
            reference.path
            if reference.source is self._source
            else f"{reference.path} of {reference.source.name}"
        )

    def _by_value(self, name: str, kind: Type, value: Any) -> Any:
        """Return a number or a structure as it is now, checked to fit; all else as it is."""
        if isinstance(kind, Scalar):
            return self.number(name, kind, value)
        if not isinstance(kind, Record) or is_empty(kind):
            return value
        try:
            return as_record(value, kind.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise LaunchError(
                f"{self._given(name)}: {value!r}", rule=f"a field does not fit: {error}"
            ) from error

    def number(self, name: str, kind: Scalar, value: Any) -> Any:
        """Return a number for its parameter, checked to fit."""
        reason = misfit(value, kind.dtype)
        if reason:
            wide = kind == ir.INT and (1 << 63) <= value < 1 << 64
            named = name.startswith("p_")
            step = f"Make it a numpy.uint64{', and annotate it so' * named}"
            if not wide:
                step = f"Pass a number that {kind.dtype} holds{', or annotate it with another type' * named}"
            is_long = isinstance(value, int) and value.bit_length() > 256
            text = f"a number of {value.bit_length()} bits" if is_long else repr(value)
            raise LaunchError(f"{self._given(name)}: {text}", rule=reason, next_step=step)
        if kind.dtype.kind in "iu":
            return int(value)
        return float(value) if kind.dtype.kind == "f" else bool(value)

    def _given(self, name: str) -> str:
        """Return what was given, for messages, by the name that it has inside of the kernel."""
        for one, reference, _ in self.kernel.captured:
            if one == name:
                return f"{self.asked}, captured value {self._path(reference)}"
        return f"{self.asked}, argument {name[2:]!r}"

    def on_host(
        self, arguments: tuple[Any, ...], views: dict[int, View], allow_overlap: bool
    ) -> tuple[HostRun, Arguments, list[Touched] | None]:
        """Return what the host driver calls, the arguments, and what they let it touch (None: anything)."""
        values: list[Any] = []
        for index, (name, kind) in enumerate(self.kernel.parameters):
            given = views[index] if isinstance(kind, Array) else arguments[index]
            values.append(self._by_value(name, kind, given))
        outside = zip(self.kernel.captured, self._captured(), strict=True)
        captured = [self._by_value(name, kind, value) for (name, _, kind), value in outside]
        parts = self._shared_parts(views) if allow_overlap else {}
        run = HostRun(self.kernel, self.host(), values, captured, parts)
        packed = Arguments([], (), 0)
        packed.spans = tuple(view.owner for view in views.values() if view.owner is not None)
        packed.host = tuple(view.host for view in views.values() if view.host is not None)
        if any(view.owner is None and view.host is None for view in views.values()):
            return run, packed, None
        touched = [
            Touched(views[index].address, size, written)
            for index, _, written, _ in self._arrays
            if (size := _size(views[index]))
        ]
        return run, packed, touched

    def _shared_parts(self, views: dict[int, View]) -> Parts:
        """Return what arrays that share memory with a written one stand on, by name."""
        places = self.places(views)
        meeting = {
            name
            for one in places
            if one.written
            for other in places
            if one is not other and share_bytes(one, other)
            for name in (one.name, other.name)
        }
        return {f"p_{one.name}": parts_of(one) for one in places if one.name in meeting}


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _size(view: View) -> int:
    return _count(view.shape) * view.dtype.itemsize
