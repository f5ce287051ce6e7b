"""The figures of the page as plotly data: the same numbers as the static ones, with hover.

Figures are plain dictionaries, so that a page is the same bytes every time. Colours named `INK`,
`FAINT` and `PAPER` are filled in by the page, which follows the reader's light or dark scheme;
`labels` are laid out by the page too, since only it knows its width.
"""
