"""How the parts are put together and started: the `penstock` command, the one-machine launcher, run files.

`cli.main` is the command; each of its subcommands has its wing, `penstock run` is `running.run`, and `results` reads
what a run has left. Only the package `penstock` imports this room, once one of its functions is used.
"""
