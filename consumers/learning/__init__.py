"""Numerics of the trainer: lag, packing, the model and its float32 head, importance weights, objectives, the learner.

Tensors in, tensors out; nothing here imports streams or files of a run. Imported through `learner.Learner`,
`packing.pack`, `trainable.check_trainable`, `lag.LagTable` and `step_report.StepReport`; by objectives through
`interfaces`. `head`, `scoring` and `model` serve the parity check too.
"""
