"""`penstock replay`: a run's recorded rollouts through the trainer's code again, under other settings.

Imported through `command`.
"""
