"""Assembles and starts the parts: the `penstock` command, the one-machine launcher, run files.

`cli.main` is the command; its subcommands have wings of their own, `penstock run` is `running.run`, and `results` reads
a run's results. Only the package `penstock` imports this room, once one of its functions is used.
"""
