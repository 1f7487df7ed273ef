"""The operator's commands: `penstock list`, `audit`, `dead`, `producers`, `weights` and `export`.

Imported through `commands`; from Python through the function of each command, which takes a run's name in `runs` or
its folder; by other views of a run through `run_access`, which opens it, `producer_list` and `tables`; by `penstock run
--resume` through `resumed.check_resumed`. A Redis of the run's own that is down is started for the call. All raise
ConfigError if there is no such run, and ServerError if its Redis cannot be reached.
"""
