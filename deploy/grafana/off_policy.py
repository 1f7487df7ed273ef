"""Off-policy: how old the data are, and what that and the engine do to them."""

from penstock.deploy.grafana.panels import (
    Row,
    by_lag,
    dashboard,
    last,
    limits_of,
    of_run,
    quantiles,
    rate,
    timeseries,
)
from penstock.schemas import limits

LAG = [
    timeseries(
        "Lag",
        "Of the tokens consumed, with the bound beyond which they are masked.",
        {**quantiles("penstock_token_lag_steps", "99 of 100 are younger"), "bound": last("penstock_lag_bound_steps")},
        unit="suffix: steps",
        bound="bound",
    ),
    timeseries(
        "Tokens beyond the bound",
        "Share of the sampled tokens that were masked for their lag, over five minutes: work thrown away.",
        {"masked for lag": of_run("penstock:tokens_beyond_bound:ratio_rate5m")},
        limits={limits.BEYOND_BOUND: "red"},
    ),
]
LOST = [
    timeseries(
        "Length, by what became of the rollout",
        "Median of the sampled tokens of a rollout, by what became of it. Stale or dead far above trained: long "
        "rollouts are lost, and the policy is trained on the short ones.",
        {
            "{{outcome}}": "histogram_quantile(0.5, sum by (outcome, le) "
            '(rate(penstock_rollout_tokens_bucket{run="$run"}[10m])))'
        },
        unit="suffix: tokens",
        log_scale=True,
    ),
    timeseries(
        "Groups lost, by length",
        "Share of the groups that were stale, dead or mostly masked for their lag, in the last full window of 256: of "
        "the longest quarter, and of the others. A difference that is no chance raises the alert.",
        {"{{length}}": last("penstock_lost_by_length_frac", by="length")},
    ),
    timeseries(
        "Rollouts, by outcome and end",
        "Why the sampling of each ended. Another mix of reasons among stale or dead ones than among the trained ones: "
        "what is trained is not what was sampled.",
        {"{{outcome}}, {{finish_reason}}": rate("penstock_rollouts_total", by="outcome, finish_reason")},
        unit="suffix: rollouts/s",
    ),
    timeseries(
        "Reward, by what became of the rollout",
        "Mean over ten minutes. Stale or dead far from trained: what is lost is not like what is trained.",
        {
            "{{outcome}}": 'sum by (outcome) (delta(penstock_rollouts_reward{run="$run"}[10m])) / '
            'sum by (outcome) (delta(penstock_rollouts_scored{run="$run"}[10m]))'
        },
        unit="short",
        minimum=None,
    ),
]
WHOLE = [
    timeseries(
        "Effective sample size",
        "Share of the tokens that still count, by the ratios as they are and by the weights applied. What lies "
        "between the two is what truncation hides. A slide comes before a collapse. Of the policy ratio too: the steps "
        'on the batch, or all of the lag with proximal = "sampled_version".',
        {
            "before truncation": last("penstock_ess_fraction"),
            "applied": last("penstock_applied_ess_fraction"),
            "policy ratio": last("penstock_policy_ess_fraction"),
        },
        maximum=1,
        **limits_of("ess_fraction"),
    ),
    timeseries(
        "χ²",
        "Variance that the importance ratios bring into the gradient; above 1 there is more noise than signal. "
        f"There is an alert for a jump to above {limits.CHI2_JUMP:g}.",
        {
            "tokens": last("penstock_chi2"),
            "rows": last("penstock_rollout_correction_chi2_seq"),
            "policy ratio": last("penstock_policy_chi2"),
        },
        unit="short",
        minimum=None,
        **limits_of("chi2"),
    ),
    timeseries(
        "Mismatch at lag 0",
        "Mean gap between the engine's and the trainer's logprobs in rows wholly of lag 0, in nats, over the last 8 "
        "batches that had some: the engine alone, no drift. Above the band there is an alert.",
        {"gap": last("penstock_mismatch_lag0_mean_nats"), "band": last("penstock_mismatch_lag0_band_nats")},
        unit="sci",
        log_scale=True,
        bound="band",
    ),
]
BY_PRODUCER = [
    timeseries(
        "Mismatch at lag 0 by producer",
        "Mean gap of each producer's last 5 groups with rows of lag 0, in nats. One that leaves the others behind has "
        "another engine than they, or other weights. The band is that of the alert for all of them together.",
        {
            "{{producer}}": last("penstock_producer_mismatch_lag0_mean_nats", by="producer"),
            "band": last("penstock_mismatch_lag0_band_nats"),
        },
        unit="sci",
        log_scale=True,
        bound="band",
    ),
    timeseries(
        "Producers in quarantine",
        "Alive, and nothing of them is trained, with what the parity check says is wrong.",
        {"{{producer}}": last("penstock_producer_quarantined", by="producer")},
        unit="short",
        limits={1: "red"},
    ),
]
BY_LAG = [
    by_lag(
        "ess_fraction",
        f"Effective sample size: which ages of data have stopped to count. Alerts below {limits.LOW_ESS:.0%}.",
        maximum=1,
    ),
    by_lag(
        "chi2",
        "Above 1 a token of that age brings more noise than signal: shorten the lag, or clip against the behavior "
        "policy.",
        minimum=None,
    ),
    by_lag(
        "k3_kl",
        "k3 estimate per token, in nats. Rising at lag 0: the engine. 0-mixed, tokens of lag 0 in rows that met an "
        "update, is drift already. Rising with lag: too much is learned per step for data this old. The "
        "limits are those of χ², which is about twice as much.",
    ),
    by_lag("weight_mean", "Applied, mean. One that falls with lag is the correction trusting old tokens less."),
    by_lag(
        "masked_frac", "Share of the sampled tokens that are masked: beyond the bound, or rejected by the correction."
    ),
    by_lag(
        "corrected_frac",
        "Share of the tokens that the correction rejects or bounds. Near 100 % the data are too old for it.",
    ),
    by_lag("num_tokens", "Of the last batch. Few make noisy numbers in the panels beside.", unit="short", stacked=True),
    timeseries(
        "Rejected by the sign of the advantage",
        "Share of the tokens of either sign that the correction rejects. A difference tilts what is learned: with "
        "only good answers let through, entropy falls.",
        {
            "good answers": last("penstock_rejected_frac_positive"),
            "bad answers": last("penstock_rejected_frac_negative"),
        },
        **limits_of("rejected_frac_positive"),
    ),
]

DASHBOARD = dashboard(
    "penstock-off-policy",
    "Penstock / Off-policy",
    "How old the tokens are when they are trained, and what age and engine do to them. Lag is in optimizer steps.",
    {
        "How old the tokens are": Row(LAG, (12,)),
        "What is lost": Row(LOST, (12,)),
        "The whole batch": Row(WHOLE),
        "By producer": Row(BY_PRODUCER, (12,)),
        "By lag: bucket 0 is the engine, what grows from there is drift": Row(BY_LAG, (8, 8, 8, 8, 8, 8, 12)),
    },
)
