"""Runs the command `tandem-epp`, for `python -m tandem_epp`."""

from .main import main

main()
