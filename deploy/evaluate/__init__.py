"""`penstock evaluate`: a model's figures on all held-out prompts of a run file, with an engine and no trainer.

Imported through `command`; `evaluation` has the results.
"""
