"""The producer's side of the stream: `connection` to Redis, `claims` on prompts, the `in_flight` table of claims, the
`writer` of groups and the `heartbeat`. What a producer leaves to those that take its claims over is in Redis by a
`progress_store`: the `rollout_progress` of groups that are sampled in one turn, the `journals` of conversations.
`context` is what every part of a producer shares, `spans` are what a claim leaves in its group's trace.
"""
