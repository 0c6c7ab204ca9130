"""What Python starts for a rank of ``echelon run``: it becomes the user's program."""

import sys

from echelon.launch.served_program import run_program

if __name__ == "__main__":
    run_program(sys.argv[1:])
