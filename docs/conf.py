"""Sphinx configuration."""

import sdpa_ref

project = "sdpa_ref"
version = release = sdpa_ref.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "sdpa_ref"
default_role = "code"
nitpicky = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
autodoc_typehints = "none"
exclude_patterns = ["_build"]
