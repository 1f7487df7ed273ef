"""The container images of producers and trainer, and what is installed in them.

`hand_out`, `healthy` and `lock` are programs of their own. Imported by nothing.
"""
