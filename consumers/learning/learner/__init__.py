"""One batch's optimizer steps.

`learner.Learner` owns model, optimizer and objective, `batch_tally` adds up what its steps find, and
`step_report.StepReport` is the outcome, which the loop, the ledger, the record and the run log read.
`warm_start.warm_steps` takes steps on what `demonstrations.read_demonstrations` reads, before the first update.
"""
