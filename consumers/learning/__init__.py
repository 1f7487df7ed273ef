"""Numerics of the trainer: lag, packing, the model and its float32 head, importance weights, objectives, the learner.

Tensors in, tensors out, and into the files of a checkpoint; nothing here imports streams. Imported by

- the loop and the stream through `learner.Learner`, `trainable.check_trainable`, `lag.LagTable`,
  and `step_report.StepReport`; the evaluation through `held_out`, as `penstock evaluate` does, the run log `outcome`;
- the start checks through `device.choose_device`, `interfaces`, `advantages.check_advantage` and
  `teacher.check_vocabularies`;
- the trainer's processes through `ranks.Ranks`, all that the numerics know of each other;
- the publication of weights through `published.PublishedPart`, references to what is published;
- the record and the run log through `batch.Batch` as well;
- `penstock export` through `export`;
- objectives through `interfaces`, and `rows` for the statistics of log-ratios;
- the parity check through `packing.pack_segments`, `model.PackedModel`, `scoring.head_logprobs`, `head`, `attention`,
  `lora.adapter_share`, `diagnostics.MismatchSums` and `importance.Correction`; its watch over producers through
  `fresh_rows.RowGap`.
"""
