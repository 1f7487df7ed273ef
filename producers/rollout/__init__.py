"""From a prompt to a scored group: `episode.Episodes` poses by an environment of `run_environments`, `sampling`
samples, from what `adoption` takes over of an earlier holder's, `scoring` scores by what `rewards` found, and a
`teacher` on a server adds its logprobs. `probe` does the same without a stream, for the parity check. `programs` ends
what rewards have started. `chat_template` finds what a model's template leaves out.
"""
