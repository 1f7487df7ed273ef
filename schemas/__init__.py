"""The contract between producers and consumers, with the standard library and msgspec only.

`rollout`, `prompt` and `segments` are the records of the stream, `policy` announces weights, `keys` names everything in
Redis, `heartbeat` and `metrics` what processes report; `config` is the run file. `process` is no contract.
"""
