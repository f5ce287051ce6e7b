"""`python -m orchestrator VERB …`."""

import gc
import sys

from orchestrator.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    gc.freeze()  # the interpreter collects at its end, 1.3 s behind a sweep, and frees nothing more
    sys.exit(code)
