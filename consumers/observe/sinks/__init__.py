"""Other places for a run's numbers: TensorBoard files, Weights & Biases. Training neither needs nor waits for them."""
