"""The operator's commands: `penstock list`, `audit`, `dead`, `producers`, `weights`, `export` and `push`.

Imported through `commands`; from Python through `audit`, `dead_letters`, `export`, `producer_list`, `run_list` and
`weight_list`, whose functions take a run's name in `runs` or its folder, start the run's own Redis for the call if it
is down, and raise ConfigError if there is no such run and ServerError if its Redis cannot be reached. Other views of a
run use `run_access`, which opens it, `producer_list` and `printing`; `penstock run --resume` uses `resumed`, and
`checkpoint.push_to_hub` `hub`.
"""
