"""python -m statekit: the command line, as the program `statekit` is."""

from statekit.cli import main

main()
