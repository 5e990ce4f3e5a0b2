"""The `tandem` command. It composes the other packages and holds little logic of its own.

`main` lists the subcommands; each is in the module of its name.
"""
