"""Groups become a batch: their lag, the rows, who trains which of them, and the loss mask.

`packing` makes a `batch.Batch` of `batch.MicroBatch`es; `layout` says where each row's tokens are in one. `sharing`
divides a batch into optimizer steps and among ranks, `split` the tokens of a pass, `lag` gives tokens their age,
`images` says where images are, and `trainable` refuses groups that cannot be trained.
"""
