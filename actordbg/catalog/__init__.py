"""The catalog: a SQLite database that knows every dump, replay, comparison and matrix of a store.

In come the store's files: `indexer.refresh` takes in what is new since the last time, and `sources` and `record_rows` say how
files become rows. Out go rows, by `query`, and by conditions that users type (`where`, `expression`). It holds nothing of its
own: it can always be made again from the files. Begin with `models`, the tables; `tables` has their columns as plain data, so
that no command has to import SQLModel.
"""
