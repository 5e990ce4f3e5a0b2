"""The running process: what is built, what it serves, and what it reads at start and again later.

    decisions       all that decides where requests go, without a server; the router uses it, too
    service         an EPP from start to SIGTERM; its `servers`, and the `pages` for people
    configuration   the configuration file and plan keys; `discovery`: a cluster's backends

Not here: anything that a request passes. Read `decisions` first.
"""
