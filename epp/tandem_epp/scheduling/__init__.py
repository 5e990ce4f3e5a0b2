"""Choosing among backends: filters and scorers rate them, a picker draws from the rated.

A filter or scorer is one small class with one method over all candidates, a picker likewise; which
of them run, with what weight, is configuration (`config`) under llm-d's names. A filter answers 0
or −∞, and −∞ rules a backend out whatever the others say. Never here: I/O, a clock, changes of the
backends' state. Read `profile` first.
"""
