"""`python -m deltawire`, the same as the `deltawire` command."""

from .cli import main

if __name__ == "__main__":
    main()
