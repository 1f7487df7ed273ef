"""TensorBoard and Weights & Biases. Training neither needs nor waits for them. Imported through `feeding`."""
