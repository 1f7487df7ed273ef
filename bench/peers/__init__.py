"""TRL's GRPOTrainer on a run file's task, in an environment of its own (`make bench-peers`)."""
