"""`penstock parity`: is it the engine or the objective? Imported through `command`, and `rollout_file` by a
program that writes the rollouts of another engine.

`command` opens its target by way of `inputs` (a run, a rollout file) or `probe` (a run file: boots one engine for the
check), runs `penstock.consumers.parity` and shows the report by way of `display`.
"""
