"""Checkpoints: the trainer's state on disk, and when one is due.

`checkpoints` writes and reads them, whole or not at all, with the counts in `state`; `model_folder` makes a Hugging
Face folder of one; `schedule` says when the next is due. How one acknowledges the stream is the business of the stream.
"""
