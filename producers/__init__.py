"""Producers: each turns prompts into rollouts on the stream, with one engine and the newest weights.

`loop.Producer` is the loop, `__main__` starts it as a process, and `interfaces` has the protocols for your own
environment and engine.
"""
