"""The trainer's processes: their group, the orders of rank 0, and the watch for a rank that is lost.

Imported by the trainer's start alone: `start` makes or joins the `world`, `led_rank` is what all ranks but the lead
run, and `watch` is over all of them.
"""
