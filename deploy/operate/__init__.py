"""The operator's commands: `penstock list`, `penstock audit`, `penstock dead` and `penstock producers`.

Imported through `commands`; by other views of a run through `run_access`, which opens it, `producer_list` and `tables`.
"""
