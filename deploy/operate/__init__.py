"""The operator's commands: `penstock list`, `audit`, `dead`, `producers`, `weights` and `export`.

Imported through `commands`; from Python through `by_name` and `run_list.list_runs`; by other views of a run through
`run_access`, which opens it, `producer_list` and `tables`; by `penstock run --resume` through `resumed.check_resumed`.
"""
