"""`penstock plan`: a run in simulated time, by the rules of a real one. Imported through `command` and `planning`.

`planning` assembles a plan from a run file, or from a run that `recorded` has read. `simulation` is the trainer's side,
with the trainer's own intake, release, settlement and lag. `producer` is the side of producers and their engines, and
`workload` gives the lengths of completions.
"""
