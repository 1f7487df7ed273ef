"""The contract between producers and consumers, with the standard library and msgspec only.

- In Redis: `rollout`, `prompt`, `segments`, `routes` and `images` define the records, `spans` what producers leave in a
  group's trace, `policy` the weight manifests, `heartbeat` a producer's heartbeat, `producer_parity` the trainer's
  findings about its rows, `description` the run's description, `keys` all names.
- In files: `config` defines the run file, `record` and `record_reader` the record of rollouts, `hidden_states` the
  input of a parity check; `model_digest` identifies model folders, `adapter` names an adapter's tensors and its base,
  `best` describes the model of the best evaluation, `figures` finds the figures of evaluations that settings name.
- `metrics` defines the metrics, `limits` says beyond what they are bad, `attrition` counts the outcomes of rollouts.
  `prefixes` finds common prefixes of sequences.

`process` is not part of the contract.
"""
