"""The trainer's reports of a run; training depends on none of them.

Imported through `run_log.RunLog` (lines of updates and evaluations in the run folder, sinks, the ledger file),
`metrics.TrainerMetrics` (Prometheus), `traces.GroupTraces` (exported by `tracing`, OpenTelemetry) and
`record.RunRecord` (the record of rollouts).
"""
