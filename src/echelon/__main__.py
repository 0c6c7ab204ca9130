"""``python -m echelon`` is ``echelon``."""

from echelon.cli import main

if __name__ == "__main__":
    main()
