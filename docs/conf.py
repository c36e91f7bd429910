"""Sphinx configuration."""

import re
import sys
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

import sdpa_ref
from sdpa_ref.masks import RULES

sys.path.insert(0, str(Path(__file__).parent))
sys.modules["numba"] = None  # the reference runs the pages, so that nothing has to be compiled first

project = "sdpa_ref"
copyright = "the sdpa_ref authors, Apache-2.0"
version = release = sdpa_ref.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx_copybutton", "numpydoc", "cells"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
default_role = "py:obj"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"
maximum_signature_line_length = 90
numpydoc_show_class_members = False

html_theme = "furo"
html_title = "sdpa_ref"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "light_css_variables": {"picture-ink": "#000"},
    "dark_css_variables": {"picture-ink": "#fff"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Draw formulas as MathML, which browsers read without a script, and clear signatures up."""
    app.add_html_math_renderer("mathml", (_formula("inline"), None), (_formula("block"), None))
    app.connect("autodoc-process-signature", _cleared)
    _list_masks(Path(__file__).parent / "api")


def _formula(display):
    def visit(self, node):
        self.body.append(convert(node.astext(), display=display))
        raise SkipNode

    return visit


def _cleared(app, what, name, obj, options, signature, returns):
    if not signature:
        return signature, returns
    signature = re.sub(r"<class '([\w.]+)'>", r"\1", signature)  # a type that is a default
    return re.sub(r", \*\*unknown\b[^,)]*", "", signature), returns


def _list_masks(folder):
    """Write the page with every mask of the registry, from which a page for each of them is made."""
    folder.mkdir(exist_ok=True)
    listed = "".join(f"   {name}\n" for name in RULES)
    options = "   :toctree: .\n   :nosignatures:\n\n"
    text = f"Mask objects\n============\n\n.. currentmodule:: sdpa_ref\n\n.. autosummary::\n{options}{listed}"
    file = folder / "masks.rst"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
