"""How the documentation is built: Sphinx, Markdown and executed notebooks (`make docs`)."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # site_parts, reference_pages
os.environ["REMAP_DRIVER"] = "host"  # what notebooks print must not depend on the machine that builds

project = "remap"
author = "the remap authors"
project_copyright = f"2026, {author}"
version = release = version_of("remap")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "site_parts",
]
exclude_patterns = ["*.py", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = "remap"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# Notebooks are stored without outputs and run here; one that fails stops the build.
nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# Docstrings are plain sentences. A name in single backticks becomes a link where it is one of ours.
default_role = "py:name"
smartquotes = False  # texts of errors show code
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_mock_imports = ["torch"]
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

# The build needs no network: links to other projects are written out where they are needed.
intersphinx_mapping: dict[str, tuple[str, None]] = {}

copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

# A `.size` in a docstring is any object's size: no link, and no complaint that many have one.
suppress_warnings = ["ref.python"]
