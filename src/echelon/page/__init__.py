"""What a person looks at: HTML pages, and views of objects in a notebook or a terminal.

``document``  a page of HTML in one file, and its parts
``view``      what ``ec.show`` says about an object: numbers, tables and pictures, without a form
``fragment``  a view as HTML for the cell of a notebook
``ownership`` the picture of buffers, in which each box is a range and has an owner

Nothing here imports torch.
"""

from echelon.page.document import definitions, facts, page, section, table
from echelon.page.fragment import html_of
from echelon.page.ownership import OWNER_COLOURS, Extent, OwnedBuffer, ownership
from echelon.page.view import Picture, TextTable, View, ViewPart, bytes_text, view_of

__all__ = [
    "OWNER_COLOURS",
    "Extent",
    "OwnedBuffer",
    "Picture",
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
