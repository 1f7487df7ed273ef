"""The trainer's side of Redis: indexes are released, groups are read and settled, and checkpoints acknowledge them.

The trainer uses `intake.Intake`, `evaluation.Evaluator`, `acknowledgement.Commits`, `recovery.Recovery` and
`leadership.Leadership`, around one `ledger.Ledger` and one `progress.RunProgress`. `tasks` decides what each index
stands for. Every write is a script in `scripts`, every command goes through `connection`. `settlement` settles indexes
and ends a run in which too many groups die; what `reader` refused goes into the record. `quarantine` holds back
groups of producers that the parity watch has found. `commit_schedule` says when a
checkpoint is due. `checkpoints` is read by replay and parity as well.
"""
