"""The trainer of a run: it reads groups of rollouts from the stream, trains on them, and publishes the policy.

`__main__` starts it as a process, `trainer.Trainer` is its loop. `stop_signals` handles SIGTERM and SIGINT before heavy
modules are imported. With several ranks this is rank 0; the others are in `distributed`.
"""
