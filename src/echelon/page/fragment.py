"""A view as HTML for the cell of a notebook.

A notebook has a theme of its own, which the scheme of the browser does not tell. So nothing here
has a ground: texts and rules take the colour of the text around them, and the boxes of pictures
have colours that can be read on light and on dark grounds. Styles stand in the elements, because
some viewers of notebooks drop style sheets.
"""

from __future__ import annotations

from html import escape

from echelon.page.view import Picture, TextTable, View, ViewPart, view_of

_FONT = "font: 13px/1.45 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MONO = "font: 12px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_RULE = "border-top: 1px solid rgba(128, 128, 128, 0.35)"
_CELL = "padding: 2px 12px 2px 0; background: none; font-variant-numeric: tabular-nums"


def html_of(shown: object) -> str:
    """The HTML that a notebook shows for an object that has a view."""
    return view_html(view_of(shown))


def view_html(view: View) -> str:
    """A view as one ``<div>``, which loads nothing and runs no script."""
    facts = " &nbsp;·&nbsp; ".join(
        f'<b>{escape(value)}</b> <span style="opacity: 0.7">{escape(label)}</span>'
        for value, label in view.facts
    )
    parts = "\n".join(_part(part) for part in view.parts)
    return (
        f'<div class="echelon" style="{_FONT}; max-width: 1000px; color: inherit">\n'
        f'<div style="font-size: 15px; font-weight: 600">{escape(view.title)}</div>\n'
        f'<div style="margin: 2px 0 6px">{facts}</div>\n{parts}\n</div>'
    )


def _part(part: ViewPart) -> str:
    about = f' <span style="opacity: 0.7">{escape(part.about)}</span>' if part.about else ""
    return (
        f'<div style="{_RULE}; margin-top: 8px; padding-top: 6px; overflow-x: auto">'
        f"<b>{escape(part.title)}</b>{about}\n{_content(part.content)}</div>"
    )


def _content(content: TextTable | Picture | str) -> str:
    if isinstance(content, Picture):
        return content.svg
    if isinstance(content, str):
        return f'<pre style="{_MONO}; margin: 4px 0; background: none">{escape(content)}</pre>'
    head = "".join(_cell("th", i, text) for i, text in enumerate(content.heads))
    rows = "\n".join(
        f"<tr>{''.join(_cell('td', i, text) for i, text in enumerate(row))}</tr>"
        for row in content.rows
    )
    return (
        '<table style="border-collapse: collapse; margin: 4px 0; color: inherit; border: 0">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>"
    )


def _cell(tag: str, column: int, text: str) -> str:
    weight = "opacity: 0.7; font-weight: 500; " if tag == "th" else ""
    side = "left" if column == 0 else "right"
    return f'<{tag} style="{weight}{_CELL}; text-align: {side}">{escape(text)}</{tag}>'
