"""Flow: who waits for whom."""

from penstock.consumers.checkpoints.schedule import MEMORY_HIGH
from penstock.deploy.grafana.panels import (
    Row,
    dashboard,
    last,
    of_run,
    of_update,
    quantiles,
    rate,
    stat,
    timeseries,
    traces,
)
from penstock.schemas import limits

GLANCE = [
    stat(
        "Waited for",
        "The bottleneck. producers: the trainer waits a fifth of its time or more. weight updates: so it does, and "
        "producers are paused three tenths of theirs. trainer: it never waits, and four fifths of the credit are "
        "groups waiting for it. nobody: neither.",
        {"{{part}}": 'penstock:bottleneck{run="$run"} == 1'},
        unit="none",
        base="blue",
        name_only=True,
        no_value="no batch in 5 min",
    ),
    stat(
        "Queue",
        "Groups that are generated and not settled, as a share of the credit. At 100 % producers stand idle.",
        {"queue": of_run("penstock:queue_fill:ratio")},
        limits={limits.QUEUE_FILLED: "orange", limits.QUEUE_FULL: "red"},
    ),
    stat(
        "Since the last update",
        "Time since the trainer consumed a batch; before the first one, since it started.",
        {"age": 'time() - max(penstock_last_update_timestamp_seconds{run="$run"})'},
        unit="s",
        limits={120: "orange", limits.NO_UPDATE_S: "red"},
    ),
    stat(
        "Producers",
        "Producers that can be scraped.",
        {"producers": 'count(penstock_producer_policy_version{run="$run"}) or vector(0)'},
        unit="none",
        limits={1: "green"},
        base="red",
    ),
    stat(
        "Alerts firing",
        "Alerts of this run, and of targets that cannot be scraped. The runbook says what to do.",
        {"alerts": 'count(ALERTS{alertstate="firing", alertname=~"Penstock.*", run=~"$run|"}) or vector(0)'},
        unit="none",
        limits={1: "red"},
    ),
]
QUEUE = [
    timeseries(
        "Groups by place",
        "The credit: free, or released and queued, in producers, or generated and ready to train. All ready: the "
        "trainer is too slow. None ready: producers are. All queued: nobody claims. Free: the run ends.",
        {
            "prompts queued": (
                'clamp_min(max(penstock_prompts_open{run="$run"}) - (sum(penstock_groups_in_flight{run="$run"}) or '
                "vector(0)), 0)"
            ),
            # What is not queued: evaluations are in flight too, and are none of the groups.
            "in producers": (
                'max(penstock_prompts_open{run="$run"}) - clamp_min(max(penstock_prompts_open{run="$run"}) - '
                '(sum(penstock_groups_in_flight{run="$run"}) or vector(0)), 0)'
            ),
            "ready to train": 'max(penstock_groups_open{run="$run"} - penstock_prompts_open{run="$run"})',
            "free credit": 'max(penstock_credit_groups{run="$run"}) - max(penstock_groups_open{run="$run"})',
        },
        unit="suffix: groups",
        stacked=True,
        colours={
            "prompts queued": "blue",
            "in producers": "purple",
            "ready to train": "orange",
            "free credit": "#9ca3af",
        },
    ),
    timeseries(
        "Admission",
        "Groups admitted, by the credit that settled ones give back: in balance both lines are one. Released again: "
        "`lost` by Redis, `stale` past the lag bound, `requeued` by `penstock dead requeue`.",
        {
            "released": rate("penstock_groups_released_total"),
            "settled": rate("penstock_groups_settled_total"),
            "again: {{reason}}": rate("penstock_groups_released_again_total", by="reason"),
        },
        unit="suffix: groups/s",
    ),
    timeseries(
        "Groups settled",
        "Trained; skipped, since all siblings have one reward; or dead. Many skipped: tasks are too easy or too hard.",
        {"{{outcome}}": rate("penstock_groups_settled_total", by="outcome")},
        unit="suffix: groups/s",
        stacked=True,
        colours={"trained": "green", "skipped": "blue", "dead": "red"},
    ),
    timeseries(
        "Groups that die",
        "Share of the groups settled in fifteen minutes. `penstock dead list` has the reasons.",
        {"dead": of_run("penstock:groups_dead:ratio_rate15m")},
        limits={limits.DEAD: "red"},
    ),
]
PRODUCERS = [
    timeseries(
        "Tokens per second",
        "Tokens sampled by each producer. One far below the others has a slower machine or is paused more.",
        {"{{producer}}": of_run("penstock:tokens_generated:rate1m")},
        unit="suffix: tokens/s",
        stacked=True,
    ),
    timeseries(
        "In flight",
        "Groups and evaluations being generated. 0: no prompts to claim (the credit is used up), or a policy past "
        "the lag bound.",
        {"{{producer}}": last("penstock_groups_in_flight", by="producer")},
        unit="suffix: groups",
    ),
    timeseries(
        "Policy behind",
        "Optimizer steps between the policy announced and the one a producer samples with. Above the bound it "
        "claims nothing.",
        {
            "{{producer}}": last("penstock_producer_policy_behind_steps", by="producer"),
            "lag bound": last("penstock_lag_bound_steps"),
        },
        unit="suffix: steps",
        bound="lag bound",
    ),
    timeseries(
        "Paused",
        "Share of the time in which a producer samples nothing because it takes new weights.",
        {"{{producer}}": of_run("penstock:producer_paused:ratio_rate5m")},
        limits={limits.PAUSED: "red"},
    ),
    timeseries(
        "A pause",
        "How long one weight update keeps a producer from sampling.",
        quantiles("penstock_weight_pause_seconds", "99 of 100 are shorter"),
        unit="s",
        limits={limits.PAUSE_S: "red"},
    ),
    timeseries(
        "Weight loads that failed",
        "In five minutes. A failure leaves the policy of before in service, and is tried again.",
        {"{{producer}}": 'sum by (producer) (increase(penstock_weight_loads_total{run="$run", result="failed"}[5m]))'},
        unit="suffix: loads",
        limits={1: "red"},
    ),
]
WEIGHTS = [
    of_update(
        "weight_changed_frac",
        "Share of the policy's elements whose bits the last update has changed. It grows with the learning rate. Above "
        "a third a delta is hardly smaller than the whole policy.",
        maximum=1,
    ),
    of_update("weight_chunk_bytes", "What each producer's host fetches for it: its chunks, compressed."),
    of_update(
        "publish_blocked_s",
        "How long a batch has waited for the publication of the policy before, which goes on beside it. More than a "
        "moment: chunks are slow to be written, or batches are too short.",
    ),
    timeseries(
        "Age of the policy held",
        "Time since the trainer announced the policy that a producer samples with. One far above the others cannot "
        "fetch what they can.",
        {"{{producer}}": last("penstock_producer_policy_age_seconds", by="producer")},
        unit="s",
    ),
    timeseries(
        "Chain",
        "Deltas announced since the newest anchor, and what each producer has read for its policy: 1 if it took every "
        "one, the anchor and what follows it if it had to begin anew.",
        {
            "since the anchor": last("penstock_weight_chain_deltas"),
            "read by {{producer}}": last("penstock_weight_chain", by="producer"),
        },
        unit="suffix: policies",
    ),
    timeseries(
        "Copies rebuilt",
        "Copies on producers' hosts that were begun anew in fifteen minutes: `dirty` after a kill, `wrong` bits, "
        "`behind` the log. One after a fault is its cure; again and again is a fault.",
        {"{{producer}}": of_run("penstock:weight_copies_rebuilt:increase15m")},
        unit="suffix: copies",
        limits={limits.COPIES_REBUILT: "red"},
    ),
    timeseries(
        "The host's copy brought up to date",
        "Time in which chunks are fetched and applied, while the engine samples on.",
        quantiles("penstock_weight_prefetch_seconds", "99 of 100 are shorter"),
        unit="s",
    ),
    timeseries(
        "Chunks in Redis",
        "What they take, and the most that they may (`weights.redis_mb`). Near it fewer old versions are kept than "
        "`weights.keep_versions` says.",
        {"chunks": last("penstock_weight_redis_bytes"), "limit": last("penstock_weight_redis_limit_bytes")},
        unit="bytes",
        bound="limit",
    ),
]
TRAINER = [
    timeseries(
        "The trainer's time",
        "Share of its time: waiting for rollouts, optimizer steps, publishing weights.",
        {
            "{{phase}}": (
                'sum by (phase) (rate(penstock_step_seconds_sum{run="$run"}[$__rate_interval])) / on () group_left '
                '() (sum(rate(penstock_step_seconds_sum{run="$run"}[$__rate_interval])) > 0)'
            )
        },
        maximum=1,
        stacked=True,
        colours={"wait": "orange", "step": "green", "publish": "blue"},
    ),
    timeseries(
        "A group's time",
        "Mean of the last batch's groups, from release to the policy they made: until they are claimed, sampled, "
        "scored, read, taken, trained, announced. `penstock report` lists the slowest groups, with their traces; the "
        "link above lists all of a run with `metrics.traces`, by index, from Tempo.",
        {"{{phase}}": last("penstock_group_seconds", by="phase")},
        unit="s",
        stacked=True,
    ).links([traces()]),
    timeseries(
        "Tokens: generated, trained, masked",
        "What is generated and neither trained nor masked is in groups without reward variance, or in the queue.",
        {
            "generated": 'sum(penstock:tokens_generated:rate1m{run="$run"})',
            "trained": of_run("penstock:tokens_trained:rate1m"),
            "masked: {{reason}}": rate("penstock_tokens_masked_total", by="reason"),
        },
        unit="suffix: tokens/s",
    ),
    timeseries(
        "Updates",
        "Batches consumed.",
        {"updates": rate("penstock_updates_total")},
        unit="suffix: updates/s",
    ),
    timeseries(
        "A checkpoint",
        "Time to write and commit one, mean since the trainer's start. A stop waits two minutes for the last (three "
        "on Kubernetes): one that takes longer is lost.",
        {
            "mean": (
                'max(penstock_checkpoint_seconds_sum{run="$run"} / (penstock_checkpoint_seconds_count{run="$run"} > 0))'
            )
        },
        unit="s",
        limits={limits.CHECKPOINT_S / 2: "orange", limits.CHECKPOINT_S: "red"},
    ),
]
REDIS = [
    timeseries(
        "Memory, of the limit",
        "Share of Redis' maxmemory. From 70 % on the trainer commits early, which makes room; above 85 % that has "
        "not helped.",
        {"{{instance}}": "max by (instance) (redis_memory_used_bytes / (redis_memory_max_bytes > 0))"},
        limits={MEMORY_HIGH: "orange", limits.MEMORY_NEARLY_FULL: "red"},
        maximum=1,
    ),
    timeseries(
        "Failed commands",
        "In five minutes, of producers by kind, and of the trainer by class of error. Each is repeated; many make a "
        "bad link.",
        {
            "producers: {{kind}}": 'sum by (kind) (increase(penstock_stream_errors_total{run="$run"}[5m]))',
            # A series begins with the first error of its class, which `increase` does not count.
            "trainer: {{kind}}": (
                'sum by (kind) (clamp_min(penstock_trainer_stream_errors_total{run="$run"} - '
                '(penstock_trainer_stream_errors_total{run="$run"} offset 5m or 0 * '
                'penstock_trainer_stream_errors_total{run="$run"}), 0))'
            ),
        },
        unit="suffix: errors",
        limits={1: "orange"},
    ),
]

DASHBOARD = dashboard(
    "penstock-flow",
    "Penstock / Flow",
    "Who waits for whom: producers, queue, trainer, Redis.",
    {
        "At a glance": Row(GLANCE, (5, 5, 5, 4, 5)),
        "Queue and credit": Row(QUEUE, (12,)),
        "Each producer": Row(PRODUCERS),
        "Weights": Row(WEIGHTS, (6,)),
        "Trainer": Row(TRAINER, (6,)),
        "Redis": Row(REDIS, (12,)),
    },
)
