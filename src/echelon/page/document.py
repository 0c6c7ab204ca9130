"""HTML pages in one file, for reports of runs and drawings of schedules.

Texts are escaped here; contents, such as drawings, are HTML. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light; --ground: #f4f6f9; --panel: #fff; --code: #f7f9fb; --ink: #1f2933;
  --muted: #616e7c; --edge: #e1e6ec; --rule: #e8ecf1; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); line-height: 1.5;
  font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
header h1 { margin: 0; font-size: 28px; font-weight: 650; letter-spacing: -0.01em; }
header p { margin: 4px 0 20px; color: var(--muted); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.fact, section { background: var(--panel); border: 1px solid var(--edge); border-radius: 10px; }
.fact { padding: 12px 16px; }
.fact b { display: block; font-size: 21px; font-weight: 600; white-space: nowrap; }
.fact span { color: var(--muted); font-size: 13px; }
section { margin-top: 16px; padding: 18px 22px; overflow-x: auto; }
section, .fact, header { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
h2 { margin: 0 0 2px; font-size: 18px; font-weight: 600; }
h2::first-letter { text-transform: uppercase; }
h3 { margin: 18px 0 0; font-size: 14.5px; font-weight: 600; }
section p { margin: 0 0 8px; color: var(--muted); font-size: 13.5px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 5px 12px; text-align: right; border-top: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { border-top: 0; color: var(--muted); font-weight: 500; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.prose th, .prose td { text-align: left; white-space: normal; overflow-wrap: anywhere;
  vertical-align: top; }
.prose td:first-child { white-space: nowrap; overflow-wrap: normal; }
.key span { padding: 1px 7px; margin-right: 7px; border-radius: 3px; color: #fff; }
pre { margin: 8px 0 0; padding: 14px 16px; background: var(--code); border-radius: 8px;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: break-spaces; overflow-wrap: anywhere; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--muted); font-size: 13.5px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr));
  gap: 6px 20px; margin: 8px 0 0; font-size: 13.5px; }
dl div { display: flex; justify-content: space-between; gap: 10px; }
dt { color: var(--muted); white-space: nowrap; overflow-wrap: normal; }
dd { margin: 0; overflow-wrap: anywhere; text-align: right; }
@media (max-width: 640px) { main { padding: 18px 10px 40px; } header h1 { font-size: 23px; }
  .facts { grid-template-columns: 1fr 1fr; gap: 8px; } .fact { padding: 9px 11px; }
  .fact b { font-size: 18px; white-space: normal; } section { padding: 14px 12px; }
  th, td { padding: 5px 6px; } td:first-child, th:first-child { white-space: normal; } }
"""

# For pages whose drawings can be read on a dark ground.
DARK_STYLE = """
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; --ground: #14181d;
  --panel: #1c2229; --code: #14181d; --ink: #e4e7eb; --muted: #9aa5b1; --edge: #323f4b;
  --rule: #28323c; } }
"""


def page(
    title: str,
    subtitle: str,
    body: Iterable[str],
    script: str = "",
    *,
    style: str = "",
    dark: bool = False,
) -> str:
    """The HTML of a page.

    ``script`` and ``style`` are JavaScript and CSS that the drawings need. ``dark`` says that they
    can be read on a dark ground, too.
    """
    style = STYLE + (DARK_STYLE if dark else "") + style
    name = escape(title)
    head = f"<script>{script}</script>\n" if script else ""
    parts = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{name} · echelon</title>\n'
        f"<style>{style}</style>\n{head}</head>\n<body>\n<main>\n"
        f"<header><h1>{name}</h1><p>{escape(subtitle)}</p></header>\n{parts}\n"
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, about: str, content: str) -> str:
    """A part of a page with a title and, unless it is empty, a sentence ``about`` it."""
    text = f"<p>{escape(about)}</p>" if about else ""
    return f"<section><h2>{escape(title)}</h2>{text}{content}</section>"


def facts(values: Iterable[tuple[str, str]]) -> str:
    """The most important numbers of a page, as pairs of a value and its label."""
    cells = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in values
    )
    return f'<div class="facts">{cells}</div>'


def definitions(values: Iterable[tuple[str, str]]) -> str:
    """A list of names and their values."""
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values
    )
    return f"<dl>{rows}</dl>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, is_prose: bool = False) -> str:
    """A table of numbers, which scrolls by itself where it is wider than the page.

    ``is_prose`` says that the cells are longer texts, which are folded instead.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    kind = ' class="prose"' if is_prose else ""
    rows_html = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table{kind}>{rows_html}</table></div>'
