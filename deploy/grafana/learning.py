"""Learning: does it learn, and is it healthy?"""

from typing import Any

from penstock.deploy.grafana import limits
from penstock.deploy.grafana.layout import DashboardRow, make_dashboard
from penstock.deploy.grafana.panels import Limit, PrometheusQuery, timeseries


def dashboard() -> dict[str, Any]:
    return make_dashboard(
        "penstock-learning",
        "Penstock / Learning",
        "Does it learn, and is it healthy? Values are those of the batch that the trainer has consumed last.",
        [_outcome(), _policy(), _optimizer()],
    )


def _last(metric: str, legend: str) -> PrometheusQuery:
    return PrometheusQuery(f'max({metric}{{run="$run"}})', legend)


def _outcome() -> DashboardRow:
    return DashboardRow(
        "Outcome",
        [
            timeseries(
                "Reward and held-out accuracy",
                "Mean reward of a batch, and of greedy answers to held-out prompts. They should rise together: a "
                "growing gap means a reward that pays for something else, a fall after a rise is a collapse.",
                [_last("penstock_reward", "reward"), _last("penstock_evaluation_reward", "held-out")],
                unit="short",
                width=12,
            ),
            timeseries(
                "Groups without variance",
                "Share of the groups whose siblings all have one reward, from which nothing is learned: tasks are too "
                "easy or too hard.",
                [
                    PrometheusQuery(
                        'sum(rate(penstock_groups_settled_total{run="$run", outcome="skipped"}[1m])) '
                        '/ (sum(rate(penstock_groups_settled_total{run="$run"}[1m])) > 0)',
                        "skipped",
                    )
                ],
                unit="percentunit",
                limits=[Limit(0.8, "red")],
                minimum=0,
                maximum=1,
                width=12,
            ),
        ],
    )


def _policy() -> DashboardRow:
    return DashboardRow(
        "Policy",
        [
            timeseries(
                "Entropy",
                "Mean token entropy of the current policy. It falls slowly while reward rises; a plunge to 0 before "
                "that is a policy that has stopped to explore.",
                [_last("penstock_entropy_nats", "entropy")],
                unit="suffix: nats",
                minimum=0,
                width=6,
            ),
            timeseries(
                "KL to the policies that sampled",
                "Per token. It grows with lag, and with an engine that differs. Orange is about where the alert for χ² "
                "begins to look; from red on there is more noise than signal.",
                [
                    _last("penstock_rollout_correction_k3_kl", "k3"),
                    _last("penstock_rollout_correction_kl", "mean log-ratio"),
                ],
                unit="suffix: nats",
                limits=[Limit(limits.KL_JUMP, "orange"), Limit(limits.KL_NOISE, "red")],
                width=6,
            ),
            timeseries(
                "KL to the reference model",
                "Per token; empty where the objective has no such term. What is much depends on the task: a steep rise "
                "without reward is a policy gone astray.",
                [_last("penstock_reference_kl_nats", "reference model")],
                unit="suffix: nats",
                minimum=0,
                width=6,
            ),
            timeseries(
                "Clip fraction",
                "Share of the tokens whose policy ratio was clipped. A few per cent are normal; a rising share means "
                "too large a step.",
                [
                    _last("penstock_policy_ratio_clipped_frac", "clipped"),
                    _last("penstock_policy_ratio_clipped_high_frac", "above the range"),
                    _last("penstock_policy_ratio_clipped_low_frac", "below the range"),
                ],
                unit="percentunit",
                limits=[Limit(0.1, "red")],
                minimum=0,
                width=6,
            ),
        ],
    )


def _optimizer() -> DashboardRow:
    return DashboardRow(
        "Optimizer",
        [
            timeseries(
                "Gradient norm",
                "Before clipping, which begins at 1 unless `trainer.max_grad_norm` says otherwise. A trend upwards "
                "calls for a lower learning rate.",
                [_last("penstock_gradient_norm", "gradient norm")],
                unit="short",
                limits=[Limit(limits.GRADIENT_NORM, "orange")],
                minimum=0,
            ),
            timeseries(
                "Learning rate",
                "Of the last batch.",
                [_last("penstock_learning_rate", "learning rate")],
                unit="sci",
                minimum=0,
            ),
            timeseries(
                "Loss",
                "Only that it is finite says something: its level depends on the objective.",
                [_last("penstock_loss", "loss")],
                unit="short",
            ),
            timeseries(
                "Optimizer steps",
                "Steps taken per second.",
                [PrometheusQuery('sum(rate(penstock_optimizer_steps_total{run="$run"}[$__rate_interval]))', "taken")],
                unit="suffix: steps/s",
                minimum=0,
                width=12,
            ),
            timeseries(
                "Steps not taken",
                "By reason, since the trainer's start. Any but `nothing left to train` deserves a look at once.",
                [PrometheusQuery('sum by (reason) (penstock_steps_skipped_total{run="$run"})', "{{reason}}")],
                unit="suffix: steps",
                limits=[Limit(1, "red")],
                minimum=0,
                width=12,
            ),
        ],
    )
