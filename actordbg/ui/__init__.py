"""The pages of `actordbg ui`, and their server on loopback.

The pages are lists with links to the documents that commands write. The store is not changed. Begin with `ui_pages`; `ui_server`
decides which requests are answered.
"""
