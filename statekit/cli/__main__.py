"""python -m statekit.cli"""

from statekit.cli import main

main()
