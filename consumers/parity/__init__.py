"""The parity check: does the engine return the logprobs that the trainer computes, and if not, why?

`check.check_parity` takes rollouts and published weights and returns a `report.ParityReport`. Its steps, in order:

1. `sample` lays out the recorded tokens by the requests that the engine served.
2. `replay` recomputes them by the trainer's own code with the weights that their labels name: the baseline. It runs any
   other assignment of weights to tokens too.
3. Hypotheses recompute the tokens in other ways, each a `verdict.Candidate`: `semantics` (another convention, unit or
   place of the numbers, through `conventions`), `sampled_tokens` (other ids, another sampling distribution),
   `versions` (other weights, moved labels, keys and values of other weights), `adapter`, `images` and `inference` (the
   head).
4. `verdict` measures the gap under each candidate, judges which of them explain the baseline's gap, and decides:
   `yardstick` measures what the model's own rounding allows (`tolerance`), `confidence` how much the sample shows.

`inference.compare_layers` compares engine and trainer layer by layer from captured hidden states, and `layer_verdict`
adds that to a report. `gate` runs the check on a trainer's first batches (by `loaded`) and watches the gap from then
on, `producers` that of each producer; neither imports the check itself. `logged_versions` provides the files of a run's
policies; `report` holds the result and the text of every cause, and needs no torch.
"""
