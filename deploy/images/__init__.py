"""The container images of producers and trainer, and what is installed in them.

`hand_out` and `healthy` are separate programs. Imported by nothing.
"""
