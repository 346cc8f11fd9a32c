"""How the names of a Python kernel are spelled in CUDA C++: two names stay two, and no name is anything but a name."""

from __future__ import annotations

import re


def entry_name(name: str) -> str:
    """Return the name of a kernel in its image; Python names such as `double` mean something else in C++."""
    return "remap_" + "".join(one if _PLAIN.fullmatch(one) else f"_u{ord(one):x}" for one in name)


def in_comment(name: str) -> str:
    """Return the name of a file as it can stand in a comment, which a line break or a backslash would end."""
    return "".join(one if _PLAIN.fullmatch(one) or one in ".-<> " else "_" for one in name)


def in_ascii(text: str) -> str:
    """Return C++ in which each name with other letters than those of ASCII has been given one of its own."""
    found: dict[str, str] = {}

    def spelled(match: re.Match[str]) -> str:
        letters = "".join(one if one.isascii() else f"_{ord(one):x}" for one in match[0])
        # No name of the typed form begins so.
        return found.setdefault(match[0], f"u{len(found)}_{letters}")

    return _OTHER.sub(spelled, text)


_PLAIN = re.compile(r"\w", re.ASCII)
_OTHER = re.compile(r"[\w\x80-\U0010ffff]*[\x80-\U0010ffff][\w\x80-\U0010ffff]*")
