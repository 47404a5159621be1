"""From a wrong result to one file that a maintainer runs: the smallest case that still shows it, as a script without actordbg.

A `FaultCase` says all of it as data. `script` renders it as Python, and that text is also what each trial runs, in a process that
`trial_host` forks: so what was reduced is what is handed over. `shrink` makes cases smaller, `fingerprint` says what has to stay.
"""
