"""The start of a run on one machine: checks, run folder, Redis, child processes, live view.

`penstock run` is `launcher.Launcher` over a `run_folder.RunFolder`, a `redis_server.RedisServer` and a
`producer_pool.ProducerPool`, after `start_checks`, `posed_tasks` and `prompt_checks`, by a `placement` on GPUs and
under a `live_view`, with the caller's `callbacks`. `command_line` is what every command shares, `engine_output` what
those share that boot an engine; `penstock try` is `trial`; `penstock producer --join` begins with `joining`.
Commands that look at a run use `run_folder`, `redis_server.connect`, `producer_pool.read_heartbeats`,
`progress.RunLines` and `endpoints`, which scrapes metrics.
"""
