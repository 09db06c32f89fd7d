"""`python -m launch` lists the commands, and `python -m launch COMMAND` runs one."""

from .main import main

if __name__ == "__main__":
    main()
