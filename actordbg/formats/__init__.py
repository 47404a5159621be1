"""File formats that the training process shares with all readers: dump record, dump file, ring, recorded weights, file names.

Writers turn tensors and facts of a call into files; readers validate untrusted files: they check everything before they use it,
and refuse an unknown version with the remedy. Standard library, numpy and zstandard only. Start with `dump_record` (the
contract), then `encoding` (write) and `dumpfile` (read); `ringfile` is the flight recorder's.
"""
