"""What an answer consists of, and its renderings: terminal, Markdown, HTML pages, JSON, charts. It knows no replay.

In come blocks (`blocks`: headings, tables, a verdict, charts as Vega-Lite specifications); out come texts and files. Begin with
`blocks`, then `renderings` (text and Markdown) and `page` (HTML). A new kind of block needs a line in each of them.
"""
