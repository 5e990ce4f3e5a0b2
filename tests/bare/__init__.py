"""A machine with Python and make, and nothing else: `make bare` runs there what needs more.

`recorder` notes in every run which tests start a program that such a machine lacks, and `make bare`
runs these with all such programs hidden. Each of them must then pass, or be left out with a reason
(`tests/cluster/fixtures.py` has fixtures for that). So a test that forgets to declare what it needs
fails, although the machine that it was written on has everything.

Two things are not noticed. What a process starts that a test has started is not recorded. And a
program that a fixture of a module or of the session starts is recorded for the first test that uses
the fixture: the others run here only with `python -m tests.bare --all`.
"""
