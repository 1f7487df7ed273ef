"""The rates on a GPU, each as a share of its limit. `pack.sh` and `unpack.sh` carry what a machine lacks."""
