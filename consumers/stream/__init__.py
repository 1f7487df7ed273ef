"""The trainer's side of Redis: indexes are released, groups are read and settled, and checkpoints acknowledge them.

The trainer uses `intake.Intake`, `evaluation.Evaluator`, `acknowledgement.Commits`, `recovery.Recovery` and
`leadership.Leadership`, around one `ledger.Ledger` and one `run_progress.RunProgress`. `tasks` assigns a task to each
index. Every write is a script in `scripts`, every command goes through `connection`. `settlement` settles indexes and
ends a run in which too many groups die; records that `reader` refused are kept in the record of rollouts. `quarantine`
withholds groups of producers whose logprobs keep differing from the trainer's. `early_end` ends a run by its
evaluations.
"""
