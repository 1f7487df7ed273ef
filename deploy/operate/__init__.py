"""The operator's commands: `penstock list`, `audit`, `dead`, `producers`, `weights` and `export`.

Imported through `commands`; by other views of a run through `run_access`, which opens it, `producer_list` and `tables`;
by `penstock run --resume` through `resumed.check_resumed`.
"""
