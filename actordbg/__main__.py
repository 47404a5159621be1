"""Run the command line as `python -m actordbg`."""

from actordbg.cli.app import main

if __name__ == "__main__":
    main()
