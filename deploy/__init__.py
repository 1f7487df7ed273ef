"""How the parts are put together and started: the `penstock` command, the one-machine launcher, run files."""
