"""The catalog: a SQLite database that knows every dump, replay, and comparison of a store.

Input: the store's files. `indexer.refresh` indexes new ones, and `sources` and `record_rows` turn files into rows. Output: rows,
selected by `query` and by conditions that users type (`where`, `expression`). Everything in it comes from the files, so it can
always be rebuilt. Begin with `models`, the tables; `tables` has their columns as plain data, so that no command has to import
SQLModel.
"""
