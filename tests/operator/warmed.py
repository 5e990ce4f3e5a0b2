"""Imported once, by the process of which all operators of the tests are forks."""

import tandem_operator.main  # noqa: F401
from tandem_operator.crd import KINDS, load_crd

# Otherwise each operator reads the files: a quarter of the CPU time of its start.
for kind in KINDS:
    load_crd(kind)
