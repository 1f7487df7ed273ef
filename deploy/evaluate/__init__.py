"""`penstock evaluate`: a model's figures on all held-out prompts of a run file, by an engine alone.

Imported through `command`; from Python through `aside`; `evaluation` has the results.
"""
