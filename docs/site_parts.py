"""What the documentation asks of Sphinx beyond its own: names become links, and what is public is in the index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from pictures import page
from reference_pages import contents, torch_names, write
from sphinx import addnodes
from sphinx.domains.python import PyXRefRole
from sphinx.util import logging

import remap

NAME = re.compile(r"remap(\.\w+)+")


class NameRole(PyXRefRole):
    """What stands in single backticks of a docstring: a link, if it can only mean a name of the library.

    A bare lowercase word is an argument more often than the function of that name, so it stays as it is.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return a link, or plain code."""
        if re.fullmatch(r"[a-z_]\w*", self.text):
            return [nodes.literal(self.text, self.text)], []
        return super().run()


def link_names(app: Any, tree: Any) -> None:
    """Make links of names such as `remap.Buffer.chunks` that stand as code in Markdown pages."""
    del app
    for code in list(tree.findall(nodes.literal)):
        text = code.astext()
        if NAME.fullmatch(text) and not isinstance(code.parent, nodes.reference | addnodes.pending_xref):
            options = {"refdomain": "py", "reftype": "obj", "reftarget": text, "refexplicit": True}
            code.replace_self(addnodes.pending_xref("", code.deepcopy(), refwarn=False, **options))


def hide_constructor(_: Any, what: str, __: str, thing: Any, *___: Any) -> tuple[str, str] | None:
    """Show no arguments of what users do not construct: errors, and classes whose docstring says what makes them."""
    made = what == "class" and "Made by `" in (thing.__doc__ or "")
    return ("", "") if made or what == "exception" else None


def check_index(app: Any, env: Any) -> None:
    """Warn, which stops the build, of public names that are not in the index."""
    del app
    known = env.get_domain("py").objects
    wanted = [f"remap.{name}" for name in remap.__all__] + [f"remap.torch.{name}" for name in torch_names()]
    for name in wanted:
        if name not in known:
            logging.getLogger(__name__).warning("%s is public and not in the reference", name)


def write_map(app: Any, error: Exception | None) -> None:
    """Put a map of memory to look around in beside the pages."""
    if error is None:
        page(Path(app.outdir, "map.html"))


def add_contents(_: Any, name: str, source: list[str]) -> None:
    """Let the lists of links of the first page be the contents that the site shows at its side.

    They stand there as plain lists, so that they can be read where no Sphinx has been: on the pages of a repository.
    """
    if name == "index":
        source[0] += contents(source[0])


def setup(app: Any) -> dict[str, bool]:
    """Take part in the build."""
    app.add_role_to_domain("py", "name", NameRole())
    app.connect("builder-inited", lambda _: write())
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("doctree-read", link_names)
    app.connect("env-check-consistency", check_index)
    app.connect("build-finished", write_map)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
