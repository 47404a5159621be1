"""The command line: each command's options, its text for a terminal, its JSON and its exit code.

In come words that a user typed; out go calls of the rooms below, one answer on standard output, notes on standard error.
Begin with `app`, the table of contents; then read any command (`replay`, `dump_ls`), whose module is imported when it is called.
`options` declares what commands share, `output` is the only way out, `replaying` is what the commands that replay have in
common. What a command works with is imported inside its function, or lies in `X_work` beside `X`, so that `--help` is quick.
"""
