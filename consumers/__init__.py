"""Readers of the rollout stream: the trainer and what it is made of."""
