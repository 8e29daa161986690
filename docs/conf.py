"""The documentation site: Sphinx with MyST and furo over the pages where they lie; `.ci/run docs` builds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / folder)
    for folder in ("docs/site", "multimesh/src", "planner/src", "numerics/src", "maxtext/src", "maxtext/tests", ".")
]

project = "MultiMesh for JAX"
author = copyright = "the authors of MultiMesh for JAX"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "generated",  # docs/site/generated.py
]

# Sources lie all over the repository, so that their links work on GitHub as they are.
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "maxtext/README.md",
    "maxtext/*/README.md",
    "planner/README.md",
    "numerics/README.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "dist", "third_party", "**/__pycache__", "**/.*"]
suppress_warnings = ["myst.xref_missing"] if "linkcheck" in sys.argv else []

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
highlight_language = "text"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

smartquotes_action = "qe"  # two hyphens begin a flag
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = project
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/top"]
html_copy_source = False
html_show_sphinx = False
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options = {"source_repository": f"https://github.com/{repository}/", "source_branch": "main"}
