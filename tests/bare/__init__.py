"""A machine with Python and make, and nothing else: `make bare` runs there what needs more.

`recorder` notes in every run which tests start a program that such a machine lacks, and `make bare`
runs these with all such programs hidden. Each of them must then pass, or be left out with a reason
(`tests/cluster/fixtures.py` has fixtures for that). So no test can forget to declare what it needs,
wherever it is, although the machine that it was written on has everything.
"""
