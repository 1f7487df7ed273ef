"""The container images of producers and trainer, and what is installed in them.

`hand_out` and `healthy` are programs of their own. Imported by nothing.
"""
