"""From logprobs to the loss: the correction of old policies, the teacher, KL in the reward, and their diagnostics.

`scoring` puts them together around an objective, of `penstock.consumers.learning.objectives` or the user's own.
`importance.Correction` corrects, `sampled_version` recomputes under older policies, `rows` has the
statistics of rows, `teacher` distils, `diagnostics.MismatchSums` measures, `ess` sizes the step.
"""
