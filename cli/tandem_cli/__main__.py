"""`python -m tandem_cli` is `tandem`."""

from .main import main

main()
