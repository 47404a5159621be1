"""Documents as lists of blocks, and their renderings: text, Markdown, HTML pages, JSON, charts. Independent of replays.

Blocks (`blocks`) are headings, tables, a verdict, charts as Vega-Lite specifications. Begin with `blocks`, then read `renderings`
(text and Markdown) and `page` (HTML). A new kind of block needs a line in each of them.
"""
