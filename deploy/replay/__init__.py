"""`penstock replay`: trains on a run's recorded rollouts again, under other settings.

Imported through `command`.
"""
