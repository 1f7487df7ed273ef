"""The producer's side of the stream: `connection` to Redis, `claims` on prompts, the `in_flight` table of claims, the
`rollout_progress` that is saved of them, the `writer` of groups and the `heartbeat`. `context` is what every part of a
producer shares.
"""
