"""The command line as ``python -m echelon``."""

from echelon.cli import main

if __name__ == "__main__":
    main()
