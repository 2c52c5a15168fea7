"""`python -m axrt` is the `axrt` command."""

from axrt.cli import main

main()
