"""`python -m tandem_epp` is `tandem-epp`."""

from .main import main

main()
