"""Numerics of the trainer. Tensors in, tensors out, and into the files of a checkpoint; nothing here imports streams.

- the wing `batch`: groups become packed rows with a lag and a loss mask;
- the wing `model`: the packed model, its float32 head, its optimizer and its files;
- the wing `loss`: from logprobs to a loss, around one of `objectives` or the user's own;
- the wing `learner`: one batch's optimizer steps;
- `interfaces`: what an objective is given and returns; `advantages`: what an advantage function is given and returns;
- `ranks.Ranks`: all that the numerics know of the trainer's other processes;
- `outcome` and `held_out`: the figures of rewards and lengths, of a batch and of an evaluation.
"""
