"""Makes `python -m deltawire.cli` the same as the `deltawire` command."""

from . import main

main()
