"""The trainer's processes: their group, rank 0's orders, and the watch for lost ranks.

Imported only where the trainer starts: `start` makes or joins the `world`, all ranks but the lead run `led_rank`, and
`watch` covers all of them.
"""
