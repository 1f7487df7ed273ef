"""The ablation: one workload trained under several engine set-ups, each compared with a reference."""
