"""TensorBoard, Weights & Biases, trackio and MLflow. Training neither needs nor waits for them.

Imported through `feeding`.
"""
