"""`python -m launch` lists the commands, and `python -m launch COMMAND` runs one."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
