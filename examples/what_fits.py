"""How long may sequences be? Fits memory (or time) over length to the inputs of a report, and finds what fits a budget.

    actordbg replay --where "run='lengths'" --backward
    actordbg report last -o inputs.csv
    python examples/what_fits.py inputs.csv --budget 80e9 --at 16384
    python examples/what_fits.py inputs.csv --time --budget 2.5

The curve is a + b n, a + c n^2 or a + b n + c n^2, without negative coefficients: attention computes n^2 scores, and nothing
shrinks as inputs grow. Each form has to predict the longest measured length from the others. Those that predict at most three
times worse than the best give a range; what fits is said by the most expensive of them. Beyond twice the longest measured
length a curve is a guess; beyond four times it is refused.
"""

import argparse
import csv
import math
from collections import defaultdict
from statistics import median

import numpy as np

FAR, FURTHEST = 2, 4
FORMS = ((0, 1), (0, 2), (0, 1, 2))
"""The powers of n in each form."""


def measured(rows, time):
    """Seconds (median, without warm-up) or bytes (largest) by length; and the shortest length that ran out of memory, or inf."""
    values, too_long = defaultdict(list), math.inf
    for row in rows:
        length = int(row["seq_len"])
        if "out-of-memory" in row["signature"]:
            too_long = min(too_long, length)
        elif row["status"] == "passed" and row["warm_up"] != "compiled":
            seconds = float(row["forward_s"]) + float(row["backward_s"] or 0)
            if time and not row["warm_up"]:
                values[length].append(seconds)
            elif not time and row["peak_memory_bytes"]:
                values[length].append(float(row["peak_memory_bytes"]))
    return {length: (median if time else max)(values[length]) for length in sorted(values)}, too_long


def fitted(points, powers):
    """The coefficients by power that fit best relative to each value, none negative; None if there are too few points."""
    if len(points) < len(powers):
        return None
    lengths, values = np.array(list(points)), np.array(list(points.values()))
    found = np.linalg.lstsq(
        np.stack([lengths.astype(float) ** power / values for power in powers], 1), np.ones(len(values)), rcond=None
    )[0]
    if (found < 0).any():
        return fitted(points, tuple(power for power, value in zip(powers, found, strict=True) if value >= 0))
    return dict(zip(powers, found, strict=True))


def at(curve, length):
    """The curve's value for a length."""
    return sum(value * length**power for power, value in curve.items())


def main():
    """Print the curve, what was measured, and what fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", help="what `actordbg report REPLAY -o FILE.csv` wrote")
    parser.add_argument("--budget", type=float, help="bytes, or with --time seconds")
    parser.add_argument("--at", type=int, action="append", default=[], help="a length to estimate; repeatable")
    parser.add_argument("--time", action="store_true", help="seconds instead of bytes")
    given = parser.parse_args()
    try:
        with open(given.report, newline="") as file:
            rows = list(csv.DictReader(file))
        kinds = {(row["replay_id"], row["batch_size"]) for row in rows}
    except (OSError, KeyError) as problem:
        parser.error(f"not a report that `actordbg report REPLAY -o FILE.csv` wrote: {given.report} ({problem!r})")
    if len(kinds) > 1:
        parser.error("inputs of several replays or batch sizes: a curve is of one")
    points, too_long = measured(rows, given.time)
    if len(points) < 3:
        parser.error(
            f"{len(points)} lengths were measured, and a curve needs three: `actordbg dump create --seq-len N` makes inputs"
        )
    longest, unit = max(points), "s" if given.time else "bytes"
    before = {length: value for length, value in points.items() if length != longest}
    forms = FORMS if len(points) > 3 else FORMS[:2]
    off = {form: at(fitted(before, form), longest) / points[longest] - 1 for form in forms}
    likely = [form for form in forms if abs(off[form]) <= 3 * min(map(abs, off.values())) + 1e-6]
    curves = {tuple(curve.items()): curve for curve in (fitted(points, form) for form in likely)}.values()

    def costs(length):
        """The least and the most that the curves say."""
        return min(at(curve, length) for curve in curves), max(at(curve, length) for curve in curves)

    for curve in curves:
        print(" + ".join(f"{value:.4g}{('', ' n', ' n^2')[power]}" for power, value in curve.items()), unit)
    print(f"the longest, {longest:,}, predicted from the others: {', '.join(f'{off[form]:+.1%}' for form in likely)}")
    for length, value in points.items():
        print(f"{length:>9,}  {value:.4g} {unit}, measured")
    for length in given.at:
        least, most = costs(length)
        guess = "; a guess: measure longer inputs" if length > FAR * longest else ""
        known = f"{least:.4g} to {most:.4g} {unit}{guess}" if length <= FURTHEST * longest else "refused: too far"
        print(f"{length:>9,}  {'ran out of memory' if length >= too_long else known}")
    if given.budget:
        lengths = range(1, int(min(FURTHEST * longest, too_long - 1)) + 1)
        fits = max((length for length in lengths if costs(length)[1] <= given.budget), default=None)
        more = " or more: measure longer inputs" if fits == FURTHEST * longest else ""
        print(f"longest that fits: {fits}{more}")


if __name__ == "__main__":
    main()
