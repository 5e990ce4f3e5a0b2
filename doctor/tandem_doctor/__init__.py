"""Looks at a running set and says what is wrong with it, and how it is mended.

Here belong what is asked of engines, sidecars, pools and the machine (`gather`), and the rules that
make findings of the answers (`rules`, pure). Never: a change to anything, nor how findings are
printed, which is the CLI's.

Read `rules` first.
"""
