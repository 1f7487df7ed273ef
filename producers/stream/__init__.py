"""The producer's side of the stream: `connection` to Redis, `claims` on prompts, the `in_flight` table, the `progress`
of what is in it, the `writer` of groups and the `heartbeat`. `context` is what every part of a producer shares.
"""
