"""The tests that failed, once more, alone on the machine: what `make test` does after a run in which at most two failed.

    python tests/project/once_more.py EXIT_CODE_OF_PYTEST

Half of the tests start processes, and three run at a time on two cores: one of thousands may see a process that came later than
ever before. A test that fails beside others and passes alone is named in the last lines, as a fault to be fixed: of the test or,
as twice before, of the product.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

AT_MOST = 2
TESTS_FAILED = 1
BY_CHANCE = "tests/fuzz/"
"""What fails here failed by the inputs that were drawn, and has found something."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(exit_code):
    """The exit code of the whole: 0 only where every test that failed passed alone."""
    if exit_code != TESTS_FAILED:
        return exit_code
    try:
        failed = list(json.loads(FAILED.read_text()))
    except (OSError, ValueError) as error:
        print(f"nothing can be tried again: pytest left no list of the tests that failed ({error})", file=sys.stderr)
        print("run it with its cache (without `-p no:cacheprovider`), in a folder that can be written", file=sys.stderr)
        return exit_code
    if not 0 < len(failed) <= AT_MOST or any(name.startswith(BY_CHANCE) for name in failed):
        return exit_code
    print(f"\n{len(failed)} failed beside other tests: once more, alone\n", flush=True)
    found = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], check=False)
    if found.returncode:
        return found.returncode
    for name in failed:
        print(f"UNSTEADY: {name} failed beside other tests and passed alone. Fix it, or what it tests.")
        if os.environ.get("GITHUB_ACTIONS"):
            print(f"::warning title=unsteady test::{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
