"""The bytes that the training process exchanges with everybody: dump record, dump file, ring, hashes of weights, names in a
store.

In come tensors and facts of a call, or files that nobody vouches for; out come files, or what they hold, checked: a reader
refuses what it does not know, with the remedy, and believes nothing that it has not looked at. Standard library, numpy and
zstandard only. Begin with `dump_record` (the contract), then `encoding` (there) and `dumpfile` (and back); `ringfile` is the
flight recorder's.
"""
