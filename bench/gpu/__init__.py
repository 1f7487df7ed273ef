"""`make gpu-check`: the tests that need a GPU, and Penstock's rates on a GPU, each as a share of its limit.

`pack.sh` and `unpack.sh` carry what a machine without a network lacks.
"""
