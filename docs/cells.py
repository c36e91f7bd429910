"""The directive `code-cell`: code that runs when the pages are built, above what it printed and drew."""

import ast
import io
import tempfile
import traceback
from contextlib import chdir, redirect_stdout
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def execute(source: str, namespace: dict[str, Any]) -> tuple[str, Any]:
    """Return what the code printed, and the value of its last line where that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = last and eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    return printed.getvalue(), value


class CodeCell(SphinxDirective):
    """A block of Python; all blocks of a page share their names."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the code, what it printed, and the picture it ended with."""
        source = "\n".join(self.content)
        namespace = self.env.temp_data.setdefault("cells", {"__name__": "__main__"})
        folder = self.env.temp_data.setdefault("folder", tempfile.TemporaryDirectory())  # for files that a page writes
        try:
            with chdir(folder.name):
                printed, value = execute(source, namespace)
        except Exception:
            raise self.error(traceback.format_exc()) from None
        picture = hasattr(value, "_repr_html_")
        if value is not None and not picture:
            printed += repr(value)
        shown: list[nodes.Node] = [nodes.literal_block(source, source, language="python")]
        if printed:
            shown.append(nodes.literal_block(printed, printed, language="none", classes=["printed"]))
        if picture:
            shown.append(nodes.raw("", f'<div class="drawn">{value._repr_html_()}</div>', format="html"))
        return shown


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("code-cell", CodeCell)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
