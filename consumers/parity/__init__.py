"""The parity check: does the engine return the logprobs that the trainer expects, and if not, which layer is wrong?"""
