"""`penstock plan`: a run in simulated time, by the rules that the real one goes by. Imported through `command` and
`planning`.

`planning` puts together what is planned, from a run file or from a run that `recorded` has read. `simulation` is the
trainer's side: its intake, release, settlement and lag are those of the trainer itself. `producer` is that of producers
and their engines, `workload` says how long completions are.
"""
