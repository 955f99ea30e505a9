"""How the page shows text, tables and figures as HTML, and what it tells of this machine."""

import base64
import re
from html import escape

import pandas as pd

# An absolute path, with its last part as group 1. No path begins within a word, a URL or a tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w/:.<])/(?:[\w.+@~-]+/)+([\w.+@~-]*)")


def without_paths(text: str) -> str:
    """Return text with each absolute path cut down to its last part.

    Where things lie on this machine is nobody's business.
    """
    return ABSOLUTE_PATH.sub(r"…/\1", text)


def table_html(table: pd.DataFrame, style: str = "") -> str:
    """Return a table of text as HTML that scrolls; `style` is a further class of page.css."""
    return f'<div class="wide {style}">{table.to_html(index=False, border=0)}</div>'


def picture_html(title: str, png: bytes) -> str:
    """Return a figure as HTML that needs no file."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
