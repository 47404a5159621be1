"""The pages of `actordbg ui`, and their server on loopback.

In come a store and what a browser asks for; out come lists with links around the documents that commands write. Nothing in the
store is changed. Begin with `ui_pages`; `ui_server` says who gets in.
"""
