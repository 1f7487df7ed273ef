"""Other places for a run's numbers: TensorBoard files, Weights & Biases. Imported through `feeding`.

Training neither needs nor waits for them.
"""
