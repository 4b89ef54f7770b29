"""Sphinx configuration of the site: run `sphinx-build -W -c docs . build/site` in the top folder of the repository.

The source folder is the whole repository, so that links between Markdown files work both in the repository and on the
site. `docs/navigation.yml` is the table of contents; `docs/write_reference.py` writes the reference.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "platform")]

import crosstrain  # noqa: E402

project = "Crosstrain"
author = "The Crosstrain authors"
copyright = author
version = release = crosstrain.__version__

extensions = ["sphinx.ext.autodoc", "sphinx_external_toc", "sphinx_copybutton", "sphinxcontrib.mermaid", "myst_parser"]
extensions += ["write_reference"]
exclude_patterns = [  # all except the pages, so that Sphinx skips environments and the output of training runs
    *(path.name for path in HERE.parent.iterdir() if path.name != "docs" and path.suffix != ".md"),
]
external_toc_path = "docs/navigation.yml"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings, with anchors as on GitHub
myst_fence_as_directive = ["mermaid"]
mermaid_height = mermaid_width = "auto"
mermaid_fullscreen = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
default_role = "code"  # single backticks in docstrings

copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"Crosstrain {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_readme.html"}
templates_path = ["_templates"]
