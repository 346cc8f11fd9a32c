"""The simulated machine as the environment describes it: `REMAP_HOST_OPTIONS="devices=4,memory=256MiB"`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from remap.errors import InvalidValueError
from remap.types import CAPABILITIES

T = TypeVar("T")
VARIABLE = "REMAP_HOST_OPTIONS"


def open_described(driver: Callable[..., T]) -> T:
    """Open a host driver with the options that the environment names, as `InvalidValueError` does the variable."""
    options = options_from_environment()
    try:
        return driver(**options)
    except InvalidValueError as error:
        if options:
            error.explain(f"{error.asked} in {VARIABLE}")
        raise


def options_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options that the environment names; raises `InvalidValueError` for what cannot be read."""
    options: dict[str, Any] = {}
    capabilities: dict[str, bool] = {}
    for part in filter(None, map(str.strip, environment.get(VARIABLE, "").split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise refused(part, "it is a list of name=value, with commas in between")
        if name in options or name in capabilities:
            raise refused(part, f"{name} is named twice")
        if name in _READERS:
            options[name] = _READERS[name](part, value)
        elif name in CAPABILITIES:
            capabilities[name] = _truth(part, value)
        else:
            near = get_close_matches(name, (*_READERS, *CAPABILITIES), n=1)
            step = f"Did you mean {near[0]}=?" if near else ""
            names = ", ".join(_READERS)
            raise refused(part, f"its options are {names}, and the names of capabilities", step)
    if capabilities:
        options["capabilities"] = capabilities
    return options


def refused(part: str, rule: str, step: str = "") -> InvalidValueError:
    """Return the error for a part of the variable, which it names: who is told has written no option in a program."""
    return InvalidValueError(f"{part} in {VARIABLE}", rule=rule, next_step=step)


def _number(part: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise refused(part, "it is a whole number") from None


def _numbers(part: str, value: str) -> int | list[int]:
    found = [_number(part, one) for one in value.split(":")]
    return found if ":" in value else found[0]


def _sizes(part: str, value: str) -> str | list[str]:
    del part  # the machine says which size is none
    return value.split(":") if ":" in value else value


def _size(part: str, value: str) -> str:
    del part
    return value


def _truth(part: str, value: str) -> bool:
    if value.lower() not in _WORDS:
        raise refused(part, f"it is one of {', '.join(_WORDS)}")
    return _WORDS[value.lower()]


def _peers(part: str, value: str) -> str | list[list[bool]]:
    return [[_truth(part, one) for one in row] for row in value.split(":")] if ":" in value else value


_WORDS = {
    "1": True,
    "yes": True,
    "true": True,
    "on": True,
    "0": False,
    "no": False,
    "false": False,
    "off": False,
}

_READERS = {
    "devices": _number,
    "memory": _sizes,
    "host_memory": _size,
    "numa_nodes": _number,
    "granularity": _size,
    "peers": _peers,
    "clock_khz": _numbers,
    "coherent": _truth,
    "integrated": _truth,
    "compression": _truth,
}
