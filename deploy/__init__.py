"""How the parts are put together and started: the `penstock` command, the one-machine launcher, run files.

`cli.main` is the command; each of its subcommands has its wing. Nothing else imports this room.
"""
