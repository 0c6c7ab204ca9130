"""What a person looks at: HTML pages, and views of objects in a notebook or a terminal.

``document``  a page of HTML in one file, and its parts
``view``      what ``ec.show`` says about an object: numbers, tables and pictures, without a form
``fragment``  a view as HTML for the cell of a notebook
``ownership`` the picture of buffers, in which each box is a range and has an owner
``colours``   what each colour means
``ticks``     round numbers on an axis
``chart``     curves and stacked areas over an axis
``rows``      rows of bars
``chart_style``  the style sheet and the script of both

Nothing here imports torch.
"""

from echelon.page.chart import Chart, Curve, Mark, Stroke
from echelon.page.chart_style import CHART_SCRIPT, CHART_STYLE
from echelon.page.document import definitions, facts, page, section, table
from echelon.page.fragment import html_of
from echelon.page.ownership import OWNER_COLOURS, Extent, OwnedBuffer, ownership
from echelon.page.rows import Bar, BarRows, Row
from echelon.page.view import Picture, TextTable, View, ViewPart, bytes_text, view_of

__all__ = [
    "CHART_SCRIPT",
    "CHART_STYLE",
    "OWNER_COLOURS",
    "Bar",
    "BarRows",
    "Chart",
    "Curve",
    "Extent",
    "Mark",
    "OwnedBuffer",
    "Picture",
    "Row",
    "Stroke",
    "TextTable",
    "View",
    "ViewPart",
    "bytes_text",
    "definitions",
    "facts",
    "html_of",
    "ownership",
    "page",
    "section",
    "table",
    "view_of",
]
