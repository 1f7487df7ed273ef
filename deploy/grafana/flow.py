"""Flow: who waits for whom."""

from typing import Any

from penstock.deploy.grafana import limits
from penstock.deploy.grafana.layout import DashboardRow, make_dashboard
from penstock.deploy.grafana.panels import Limit, PrometheusQuery, stat, states, timeseries

TOKENS_PER_S = "suffix: tokens/s"
GROUPS = "suffix: groups"


def dashboard() -> dict[str, Any]:
    return make_dashboard(
        "penstock-flow",
        "Penstock / Flow",
        "Who waits for whom: producers, queue, trainer, Redis.",
        [_glance(), _queue(), _producers(), _trainer(), _redis()],
    )


def _glance() -> DashboardRow:
    return DashboardRow(
        "At a glance",
        [
            stat(
                "Waited for",
                "The bottleneck. producers: the trainer waits a fifth of its time or more. weight updates: so it does, "
                "and producers are paused three tenths of theirs. trainer: it never waits, and four fifths of the "
                "credit are groups waiting for it. nobody: neither.",
                PrometheusQuery('penstock:bottleneck{run="$run"} == 1', "{{part}}"),
                unit="none",
                base="blue",
                name_only=True,
                no_value="no batch in 5 min",
            ),
            stat(
                "Trainer busy",
                "Share of the trainer's time spent on optimizer steps and on publishing weights, over five minutes.",
                PrometheusQuery('1 - penstock:trainer_waiting:ratio_rate5m{run="$run"}', "busy"),
                unit="percentunit",
                limits=[Limit(0.5, "orange"), Limit(1 - limits.WAITING, "green")],
                base="red",
            ),
            stat(
                "Queue",
                "Groups that are generated and not settled, as a share of the credit. At 100 % producers stand idle.",
                PrometheusQuery('penstock:queue_fill:ratio{run="$run"}', "queue"),
                unit="percentunit",
                limits=[Limit(0.8, "orange"), Limit(limits.QUEUE_FULL, "red")],
            ),
            stat(
                "Since the last update",
                "Time since the trainer consumed a batch; before the first one, since it started.",
                PrometheusQuery('time() - max(penstock_last_update_timestamp_seconds{run="$run"})', "age"),
                unit="s",
                limits=[Limit(120, "orange"), Limit(limits.NO_UPDATE_S, "red")],
            ),
            stat(
                "Producers",
                "Producers that can be scraped.",
                PrometheusQuery('count(penstock_producer_policy_version{run="$run"}) or vector(0)', "producers"),
                unit="none",
                limits=[Limit(1, "green")],
                base="red",
            ),
            stat(
                "Alerts firing",
                "Alerts of this run, and of targets that cannot be scraped. The runbook says what to do.",
                PrometheusQuery(
                    'count(ALERTS{alertstate="firing", alertname=~"Penstock.*", run=~"$run|"}) or vector(0)', "alerts"
                ),
                unit="none",
                limits=[Limit(1, "red")],
            ),
        ],
    )


def _queue() -> DashboardRow:
    return DashboardRow(
        "Queue and credit",
        [
            timeseries(
                "Groups by place",
                "The credit: free, or released and queued, in producers, or generated and ready to train. All ready: "
                "the trainer is too slow. None ready: producers are. All queued: nobody claims. Free: the run ends.",
                [
                    PrometheusQuery(
                        'clamp_min(max(penstock_prompts_open{run="$run"}) - '
                        '(sum(penstock_groups_in_flight{run="$run"}) or vector(0)), 0)',
                        "prompts queued",
                    ),
                    # What is not queued: evaluations are in flight too, and are none of the groups.
                    PrometheusQuery(
                        'max(penstock_prompts_open{run="$run"}) - clamp_min(max(penstock_prompts_open{run="$run"}) - '
                        '(sum(penstock_groups_in_flight{run="$run"}) or vector(0)), 0)',
                        "in producers",
                    ),
                    PrometheusQuery(
                        'max(penstock_groups_open{run="$run"} - penstock_prompts_open{run="$run"})',
                        "ready to train",
                    ),
                    PrometheusQuery(
                        'max(penstock_credit_groups{run="$run"}) - max(penstock_groups_open{run="$run"})',
                        "free credit",
                    ),
                ],
                unit=GROUPS,
                minimum=0,
                stacked=True,
                colours={
                    "prompts queued": "blue",
                    "in producers": "purple",
                    "ready to train": "orange",
                    "free credit": "#9ca3af",
                },
                width=12,
            ),
            timeseries(
                "Admission",
                "Groups admitted, by the credit that settled ones give back: in balance both lines are one. Released "
                "again: `lost` by Redis, `stale` past the lag bound, `requeued` by `penstock dead requeue`.",
                [
                    PrometheusQuery(
                        'sum(rate(penstock_groups_released_total{run="$run"}[$__rate_interval]))', "released"
                    ),
                    PrometheusQuery(
                        'sum(rate(penstock_groups_settled_total{run="$run"}[$__rate_interval]))', "settled"
                    ),
                    PrometheusQuery(
                        'sum by (reason) (rate(penstock_groups_released_again_total{run="$run"}[$__rate_interval]))',
                        "again: {{reason}}",
                    ),
                ],
                unit="suffix: groups/s",
                minimum=0,
                width=12,
            ),
            timeseries(
                "Groups settled",
                "Trained; skipped, since all siblings have one reward; or dead. Many skipped: tasks are too easy or "
                "too hard.",
                [
                    PrometheusQuery(
                        'sum by (outcome) (rate(penstock_groups_settled_total{run="$run"}[$__rate_interval]))',
                        "{{outcome}}",
                    )
                ],
                unit="suffix: groups/s",
                minimum=0,
                stacked=True,
                colours={"trained": "green", "skipped": "blue", "dead": "red"},
            ),
            timeseries(
                "Groups that die",
                "Share of the groups settled in fifteen minutes. `penstock dead list` has the reasons.",
                [PrometheusQuery('penstock:groups_dead:ratio_rate15m{run="$run"}', "dead")],
                unit="percentunit",
                limits=[Limit(limits.DEAD, "red")],
                minimum=0,
            ),
            states(
                "Waited for, over time",
                "The bottleneck, as at the top.",
                PrometheusQuery('penstock:bottleneck{run="$run"}', "{{part}}"),
                on="waited for",
            ),
        ],
    )


def _producers() -> DashboardRow:
    return DashboardRow(
        "Each producer",
        [
            timeseries(
                "Tokens per second",
                "Tokens sampled by each producer. One far below the others has a slower machine or is paused more.",
                [PrometheusQuery('penstock:tokens_generated:rate1m{run="$run"}', "{{producer}}")],
                unit=TOKENS_PER_S,
                minimum=0,
                stacked=True,
            ),
            timeseries(
                "In flight",
                "Groups and evaluations being generated. 0: no prompts to claim (the credit is used up), or a policy "
                "past the lag bound.",
                [PrometheusQuery('max by (producer) (penstock_groups_in_flight{run="$run"})', "{{producer}}")],
                unit=GROUPS,
                minimum=0,
            ),
            timeseries(
                "Policy behind",
                "Optimizer steps between the policy announced and the one a producer samples with. Above the bound it "
                "claims nothing.",
                [
                    PrometheusQuery(
                        'max by (producer) (penstock_producer_policy_behind_steps{run="$run"})', "{{producer}}"
                    ),
                    PrometheusQuery('max(penstock_lag_bound_steps{run="$run"})', "lag bound"),
                ],
                unit="suffix: steps",
                minimum=0,
                colours={"lag bound": "red"},
                dashed=["lag bound"],
            ),
            timeseries(
                "Paused",
                "Share of the time in which a producer samples nothing because it takes new weights.",
                [PrometheusQuery('penstock:producer_paused:ratio_rate5m{run="$run"}', "{{producer}}")],
                unit="percentunit",
                limits=[Limit(limits.PAUSED, "red")],
                minimum=0,
            ),
            timeseries(
                "A pause",
                "How long one weight update keeps a producer from sampling.",
                [
                    PrometheusQuery(
                        f"histogram_quantile({quantile}, sum by (le) "
                        '(rate(penstock_weight_pause_seconds_bucket{run="$run"}[$__rate_interval])))',
                        name,
                    )
                    for quantile, name in ((0.5, "median"), (0.99, "99 of 100 are shorter"))
                ],
                unit="s",
                limits=[Limit(limits.PAUSE_S, "red")],
                minimum=0,
            ),
            timeseries(
                "Weight loads that failed",
                "In five minutes. A failure leaves the policy of before in service, and is tried again.",
                [
                    PrometheusQuery(
                        'sum by (producer) (increase(penstock_weight_loads_total{run="$run", result="failed"}[5m]))',
                        "{{producer}}",
                    )
                ],
                unit="suffix: loads",
                limits=[Limit(1, "red")],
                minimum=0,
            ),
        ],
    )


def _trainer() -> DashboardRow:
    return DashboardRow(
        "Trainer",
        [
            timeseries(
                "The trainer's time",
                "Share of its time: waiting for rollouts, optimizer steps, publishing weights.",
                [
                    PrometheusQuery(
                        'sum by (phase) (rate(penstock_step_seconds_sum{run="$run"}[$__rate_interval])) '
                        "/ on () group_left () "
                        '(sum(rate(penstock_step_seconds_sum{run="$run"}[$__rate_interval])) > 0)',
                        "{{phase}}",
                    )
                ],
                unit="percentunit",
                minimum=0,
                maximum=1,
                stacked=True,
                colours={"wait": "orange", "step": "green", "publish": "blue"},
                width=6,
            ),
            timeseries(
                "Tokens: generated, trained, masked",
                "What is generated and neither trained nor masked is in groups without reward variance, or in the "
                "queue.",
                [
                    PrometheusQuery('sum(penstock:tokens_generated:rate1m{run="$run"})', "generated"),
                    PrometheusQuery('penstock:tokens_trained:rate1m{run="$run"}', "trained"),
                    PrometheusQuery(
                        'sum by (reason) (rate(penstock_tokens_masked_total{run="$run"}[$__rate_interval]))',
                        "masked: {{reason}}",
                    ),
                ],
                unit=TOKENS_PER_S,
                minimum=0,
                width=6,
            ),
            timeseries(
                "Updates",
                "Batches consumed.",
                [PrometheusQuery('sum(rate(penstock_updates_total{run="$run"}[$__rate_interval]))', "updates")],
                unit="suffix: updates/s",
                minimum=0,
                width=6,
            ),
            timeseries(
                "A checkpoint",
                "Time to write and commit one, mean since the trainer's start. A stop waits two minutes for the last "
                "(three on Kubernetes): one that takes longer is lost.",
                [
                    PrometheusQuery(
                        'max(penstock_checkpoint_seconds_sum{run="$run"} '
                        '/ (penstock_checkpoint_seconds_count{run="$run"} > 0))',
                        "mean",
                    )
                ],
                unit="s",
                limits=[Limit(limits.CHECKPOINT_S / 2, "orange"), Limit(limits.CHECKPOINT_S, "red")],
                minimum=0,
                width=6,
            ),
        ],
    )


def _redis() -> DashboardRow:
    return DashboardRow(
        "Redis",
        [
            timeseries(
                "Memory",
                "From redis_exporter; empty without one (the runbook says how to have it). At the limit producers are "
                "refused. The server may hold other runs as well.",
                [
                    PrometheusQuery("max by (instance) (redis_memory_used_bytes)", "used, {{instance}}"),
                    PrometheusQuery("min(redis_memory_max_bytes > 0)", "limit"),
                ],
                unit="bytes",
                minimum=0,
                colours={"limit": "red"},
                dashed=["limit"],
            ),
            timeseries(
                "Memory, of the limit",
                "Share of Redis' maxmemory. From 70 % on the trainer commits early, which makes room; above 85 % that "
                "has not helped.",
                [
                    PrometheusQuery(
                        "max by (instance) (redis_memory_used_bytes / (redis_memory_max_bytes > 0))",
                        "{{instance}}",
                    )
                ],
                unit="percentunit",
                limits=[Limit(limits.EARLY_COMMIT, "orange"), Limit(limits.MEMORY_NEARLY_FULL, "red")],
                minimum=0,
                maximum=1,
            ),
            timeseries(
                "Failed commands",
                "In five minutes, of producers by kind, and of the trainer by class of error. Each is repeated; many "
                "make a bad link.",
                [
                    PrometheusQuery(
                        'sum by (kind) (increase(penstock_stream_errors_total{run="$run"}[5m]))',
                        "producers: {{kind}}",
                    ),
                    # A series begins with the first error of its class, which `increase` does not see.
                    PrometheusQuery(
                        'sum by (kind) (clamp_min(penstock_trainer_stream_errors_total{run="$run"} - '
                        '(penstock_trainer_stream_errors_total{run="$run"} offset 5m '
                        'or 0 * penstock_trainer_stream_errors_total{run="$run"}), 0))',
                        "trainer: {{kind}}",
                    ),
                ],
                unit="suffix: errors",
                limits=[Limit(1, "orange")],
                minimum=0,
            ),
        ],
    )
