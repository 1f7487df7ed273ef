"""The contract between producers and consumers, with the standard library and msgspec only.

- In Redis: `rollout`, `prompt` and `segments` are the records, `policy` announces weights, `heartbeat` is a producer's
  sign of life, `producer_parity` what the trainer has found of its rows, `description` what a run says of itself,
  `keys` names everything.
- In files: `config` is the run file, `record` and `record_reader` the record of rollouts,
  `hidden_states` what a parity check reads; `model_digest` tells model folders apart, `adapter` names an
  adapter's tensors and its base, `best` says what the model of the best evaluation is, `figures` which figures of
  evaluations settings name.
- `metrics` names what processes report to Prometheus, `attrition` counts what became of rollouts. `prefixes` finds
  common prefixes of sequences.

`process` is no contract.
"""
