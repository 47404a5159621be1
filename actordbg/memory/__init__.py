"""Memory over time: samples of the processes of a replay, a run or a Ray cluster, and where two series of them part."""
