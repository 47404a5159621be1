#!/usr/bin/env bash
# A node of a Ray cluster, until the head ends it.
set -euo pipefail
exec ray start --address="${HEAD:-head:6379}" --num-cpus=1 --disable-usage-stats --block
