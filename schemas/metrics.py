"""Names of every Prometheus metric, with its help text. Units are suffixes, by Prometheus' convention."""

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.schemas import limits

REWARD = "reward"
"""The key of the mean reward in updates.jsonl and evaluations.jsonl; for its parts see `part_key`."""
_FIGURE = re.compile(r"reward(/.+)?|pass@\d+", re.DOTALL)
MAX_PARTS = 32
"""Most parts of the reward in a line or at an endpoint."""
MAX_PART_CHARACTERS = 64
"""Parts with longer names are left out of lines and endpoints."""


class Metric(NamedTuple):
    """A metric's definition.

    values: label values known in advance. They are served from the start, as 0: a rate over a series that begins at its
        first event misses that event.
    unit: if it is not the name's last word; "none" for a number without a unit.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()
    unit: str = ""


LAG_LABELS = ("0", "0-mixed", "1", "2-3", "4-7", "8+")
"""The lag buckets of the mismatch diagnostics, in optimizer steps: values of the label `lag`.

`0` holds tokens of rows whose tokens all have lag 0, `0-mixed` tokens of lag 0 in rows with an older token.
"""
LAG_STARTS = (1, 2, 4, 8)
"""First lag of each bucket after those of lag 0."""
TOKEN_LAG_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
PAUSE_BUCKETS = (0.005, 0.01, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LENGTH_BUCKETS = (0.0, *(2.0**n for n in range(18)))
"""Sampled tokens of a rollout."""


class ProducerMetric:
    """A producer has each under its name in lower case; another one is an entry here, and the line that sets it."""

    TOKENS_GENERATED = Metric("penstock_tokens_generated_total", "Tokens sampled", unit="tokens")
    GROUPS_APPENDED = Metric(
        "penstock_groups_appended_total",
        "Groups appended to the rollout stream",
        ("kind",),
        values=("group", "dead"),
        unit="groups",
    )
    EVALUATIONS_APPENDED = Metric("penstock_evaluations_appended_total", "Evaluation groups answered", unit="groups")
    IN_FLIGHT = Metric("penstock_groups_in_flight", "Groups being generated now", unit="groups")
    POLICY_VERSION = Metric("penstock_producer_policy_version", "Policy version held by the engine", unit="none")
    POLICY_BEHIND = Metric("penstock_producer_policy_behind_steps", "Announced version minus the version held")
    PAUSE_S = Metric("penstock_weight_pause_seconds", "Time without sampling per weight update", (), PAUSE_BUCKETS)
    PREFETCH_S = Metric(
        "penstock_weight_prefetch_seconds",
        "Time to bring the host's copy of the weights up to date while sampling, or to wait for another producer that "
        "does",
        (),
        STEP_BUCKETS,
    )
    PATCH_S = Metric(
        "penstock_weight_patch_seconds", "Time in which bytes of the host's copy were changed", (), PAUSE_BUCKETS
    )
    WEIGHT_BYTES = Metric("penstock_weight_bytes_total", "Bytes of weights fetched")
    WEIGHT_CHAIN = Metric("penstock_weight_chain", "Policies read to get to the last one", unit="policies")
    COPIES_REBUILT = Metric(
        "penstock_weight_copies_rebuilt_total",
        "Copies of the weights on this host that were written from a whole policy on, by reason",
        ("reason",),
        values=("new", "dirty", "wrong", "behind"),
        unit="copies",
    )
    POLICY_AGE_S = Metric("penstock_producer_policy_age_seconds", "Time since the policy held was announced")
    WEIGHT_LOADS = Metric(
        "penstock_weight_loads_total",
        "Weight updates by result",
        ("result",),
        values=("loaded", "failed"),
        unit="loads",
    )
    STREAM_ERRORS = Metric(
        "penstock_stream_errors_total",
        "Redis commands that failed, by kind",
        ("kind",),
        values=("connection", "timeout", "oom", "response"),
        unit="errors",
    )
    PROGRESS_TOKENS = Metric(
        "penstock_progress_tokens_total",
        "Tokens of rollouts in flight: saved in Redis, adopted from another producer, or found there and of no use",
        ("what",),
        values=("saved", "adopted", "ignored"),
        unit="tokens",
    )
    PROGRESS_BYTES = Metric("penstock_progress_bytes_total", "Bytes of progress written to Redis")
    PROGRESS_WRITE_S = Metric(
        "penstock_progress_write_seconds", "Time to write the progress of all rollouts in flight", (), PAUSE_BUCKETS
    )
    PROGRESS_FAILURES = Metric(
        "penstock_progress_failures_total",
        "Progress of rollouts that was not written or read, by reason",
        ("reason",),
        values=("redis", "memory", "size", "record"),
        unit="rollouts",
    )
    TOKENS_ABORTED = Metric(
        "penstock_tokens_aborted_total",
        "Sampled tokens of groups that were given up because they could not be within the lag bound",
        unit="tokens",
    )
    REWARD_ERRORS = Metric(
        "penstock_reward_errors_total", "Groups whose reward raised or was not finite", unit="groups"
    )
    AGENT_ROLLOUTS = Metric(
        "penstock_agent_rollouts_total",
        "Rollouts of agents that ended, by outcome",
        ("outcome",),
        values=("finished", "dead"),
        unit="rollouts",
    )
    AGENT_ROLLOUTS_OPEN = Metric("penstock_agent_rollouts_open", "Rollouts of agents that are open", unit="rollouts")
    AGENT_CALLS_RUNNING = Metric(
        "penstock_agent_calls_running", "Calls of agents that are being answered", unit="calls"
    )
    AGENT_CALLS = Metric(
        "penstock_agent_calls_total",
        "Calls of agents answered, by how their prompt came about",
        ("prompt",),
        unit="calls",
    )
    AGENT_SEGMENTS = Metric(
        "penstock_agent_segments_total",
        "Segments opened after a rollout's first, by reason",
        ("reason",),
        unit="segments",
    )
    AGENT_FIELDS_IGNORED = Metric(
        "penstock_agent_fields_ignored_total",
        "Calls of agents with a field that was ignored (endpoint.unsupported), by its name",
        ("field",),
        unit="calls",
    )
    ALTERNATE_STOPS = Metric(
        "penstock_agent_alternate_stops_total",
        "Answers that a stop token other than the template's has ended",
        unit="answers",
    )
    AGENT_TOKENS = Metric(
        "penstock_agent_tokens_total", "Tokens sampled for agents in rollouts that ended", unit="tokens"
    )
    AGENT_TOKENS_DELIVERED = Metric(
        "penstock_agent_tokens_delivered_total", "Tokens sampled for agents in groups that were appended", unit="tokens"
    )


class TrainerMetric:
    """The trainer also serves `TRAINER_GAUGES` and the gauges by lag and by environment."""

    TOKEN_LAG = Metric("penstock_token_lag_steps", "Lag of sampled tokens at consumption", (), TOKEN_LAG_BUCKETS)
    TOKENS_TRAINED = Metric(
        "penstock_tokens_trained_total", "Sampled tokens that reached the loss unmasked", unit="tokens"
    )
    TOKENS_MASKED = Metric(
        "penstock_tokens_masked_total",
        "Sampled tokens masked: older than twice max_lag, or by the correction",
        ("reason",),
        values=("lag", "correction"),
        unit="tokens",
    )
    GROUPS_SETTLED = Metric(
        "penstock_groups_settled_total",
        "Released indexes settled, by outcome",
        ("outcome",),
        values=("trained", "skipped", "dead"),
        unit="groups",
    )
    GROUPS_RELEASED = Metric("penstock_groups_released_total", "Indexes released for the first time", unit="groups")
    GROUPS_RELEASED_AGAIN = Metric(
        "penstock_groups_released_again_total",
        "Indexes released again, by reason",
        ("reason",),
        values=("lost", "stale", "quarantined", "requeued"),
        unit="groups",
    )
    CREDIT = Metric("penstock_credit_groups", "The most groups that may be released and not settled")
    GROUPS_OPEN = Metric("penstock_groups_open", "Groups released and not settled", unit="groups")
    LAG_BOUND = Metric("penstock_lag_bound_steps", "Lag for which prompts are released and started")
    DUPLICATES = Metric(
        "penstock_duplicates_dropped_total", "Groups dropped since another one of their index came first", unit="groups"
    )
    UPDATES = Metric("penstock_updates_total", "Batches consumed", unit="batches")
    OPTIMIZER_STEPS = Metric("penstock_optimizer_steps_total", "Optimizer steps taken")
    LAST_UPDATE = Metric(
        "penstock_last_update_timestamp_seconds",
        "Unix time of the last batch consumed, at first of the trainer's start",
    )
    STEPS_SKIPPED = Metric(
        "penstock_steps_skipped_total",
        "Optimizer steps not taken, by reason",
        ("reason",),
        values=("loss is not finite", "gradient norm is not finite", "nothing left to train"),
        unit="steps",
    )
    REWARD_PART = Metric("penstock_reward_part", "Mean of a part of the reward over the batch", ("part",), unit="none")
    EVALUATION_REWARD = Metric("penstock_evaluation_reward", "Mean reward on held-out prompts", unit="none")
    EVALUATION_REWARD_PART = Metric(
        "penstock_evaluation_reward_part", "Mean of a part of the reward on held-out prompts", ("part",), unit="none"
    )
    FILL_SKIPPED_GROUPS = Metric(
        "penstock_fill_skipped_groups_total", "Groups without reward variance skipped while batches were filled"
    )
    FILL_SKIPPED_TOKENS = Metric(
        "penstock_fill_skipped_tokens_total",
        "Tokens sampled in groups skipped while batches were filled",
        unit="tokens",
    )
    ENVIRONMENT_GROUPS = Metric(
        "penstock_environment_groups_total",
        "Groups of an environment in batches, by outcome",
        ("environment", "outcome"),
    )
    ENVIRONMENT_EVALUATION_REWARD = Metric(
        "penstock_environment_evaluation_reward",
        "Mean reward on an environment's held-out prompts",
        ("environment",),
        unit="none",
    )
    EVALUATION_FIGURE = Metric(
        "penstock_evaluation_figure",
        "What an evaluation measured of an environment's held-out prompts beside the reward: pass@k, standard errors, "
        "lengths, by its key in evaluations.jsonl",
        ("environment", "figure"),
        unit="none",
    )
    GROUPS_ABANDONED = Metric("penstock_abandoned_groups", "Groups that agents have abandoned since the last good one")
    PROMPTS = Metric("penstock_prompts_open", "Released prompts not yet appended", unit="groups")
    OBJECTIVE = Metric(
        "penstock_objective", "What the objective reports beyond the metrics named here", ("name",), unit="none"
    )
    STEP_SECONDS = Metric(
        "penstock_step_seconds", "Time per batch by phase", ("phase",), STEP_BUCKETS, values=("wait", "step", "publish")
    )
    GROUP_SECONDS = Metric(
        "penstock_group_seconds",
        "Time of the last batch's groups by phase, from release to the policy they made, mean",
        ("phase",),
        values=("queue", "sample", "reward", "stream", "batch", "step", "publish"),
    )
    WEIGHT_BYTES = Metric(
        "penstock_weight_bytes_published_total", "Bytes of chunks of weights published, anchors included", unit="B"
    )
    WEIGHT_ANCHORS = Metric("penstock_weight_anchors_total", "Policies published whole", unit="policies")
    WEIGHT_REDIS_LIMIT = Metric("penstock_weight_redis_limit_bytes", "The most that chunks of weights take in Redis")
    CHECKPOINT_SECONDS = Metric(
        "penstock_checkpoint_seconds", "Time to write and commit a checkpoint, beside the training", (), STEP_BUCKETS
    )
    PARITY_ALERT = Metric(
        "penstock_trainer_parity_alert",
        "1 while the gap between engine and trainer at lag 0 is outside its tolerance",
        unit="none",
    )
    MISMATCH_MEAN = Metric(
        "penstock_mismatch_lag0_mean_nats",
        "Gap between engine and trainer at lag 0, mean over the last 8 batches with one",
    )
    MISMATCH_BAND = Metric("penstock_mismatch_lag0_band_nats", "The largest such mean without the alert")
    PRODUCER_MISMATCH = Metric(
        "penstock_producer_mismatch_lag0_mean_nats",
        "Gap between a producer's engine and the trainer at lag 0, mean over its last 5 groups with such rows; of "
        "producers that are alive",
        ("producer",),
    )
    PRODUCER_QUARANTINED = Metric(
        "penstock_producer_quarantined",
        "1 for a producer whose last 5 groups were outside the gate's band: none is trained until it is started again",
        ("producer",),
        unit="none",
    )
    ROLLOUT_TOKENS = Metric(
        "penstock_rollout_tokens",
        "Sampled tokens of a rollout, by what became of it",
        ("outcome",),
        LENGTH_BUCKETS,
        values=("trained", "skipped", "stale", "quarantined", "dead", "duplicate"),
        unit="tokens",
    )
    ROLLOUTS = Metric(
        "penstock_rollouts_total",
        "Rollouts, by what became of them and why their sampling ended; unknown of those without a record: of dead "
        "groups, or missing from a group that went on",
        ("outcome", "environment", "finish_reason"),
        unit="rollouts",
    )
    ROLLOUT_TOKENS_MASKED = Metric(
        "penstock_rollout_tokens_masked_total",
        "Sampled tokens of rollouts that were older than twice max_lag when they were trained",
        ("outcome", "environment"),
        unit="tokens",
    )
    ROLLOUTS_SCORED = Metric(
        "penstock_rollouts_scored",
        "Rollouts with a reward since the run began, by what became of them",
        ("outcome", "environment"),
        unit="rollouts",
    )
    ROLLOUTS_REWARD = Metric(
        "penstock_rollouts_reward",
        "Sum of the rewards of rollouts since the run began, by what became of them",
        ("outcome", "environment"),
        unit="none",
    )
    TRIES_LOST = Metric(
        "penstock_tries_lost_total",
        "Tries at a group that ended with their producer and were not gone on from",
        unit="tries",
    )
    LOST = Metric(
        "penstock_lost_by_length_frac",
        "Share of the groups that were lost: stale, dead, or mostly masked for lag; of the longest quarter and of the "
        "others, in the last full window",
        ("length",),
        values=("longest", "others"),
    )
    LONG_LOST = Metric(
        "penstock_long_rollouts_lost_alert",
        "1 while long groups are lost at a rate that short ones are not",
        unit="none",
    )
    STREAM_ERRORS = Metric(
        "penstock_trainer_stream_errors_total", "Redis commands that failed, by kind", ("kind",), unit="errors"
    )
    SINK_ERRORS = Metric(
        "penstock_sink_errors_total",
        "Failures of a sink, such as Weights & Biases, to take a run's numbers",
        ("sink",),
        values=("tensorboard", "wandb", "trackio", "mlflow"),
        unit="errors",
    )


def prometheus_name(key: str) -> str:
    """Returns the Prometheus name of a diagnostic; `key` is its name in a line of updates.jsonl."""
    return "penstock_" + key.replace("/", "_")


class UpdateMetric(NamedTuple):
    """A number of each update, under its key in a line of updates.jsonl; gauges serve that of the last batch.

    by: labels that split it, each in a gauge of its own. title: what reports, panels and live views call it. It begins
    to be wrong above `worse_above`, and is beyond `bad_above` or `bad_below`.
    """

    help: str
    unit: str = ""
    by: tuple[str, ...] = ()
    title: str = ""
    worse_above: float | None = None
    bad_above: float | None = None
    bad_below: float | None = None

    def is_bad(self, value: float) -> bool:
        """Returns whether a value is beyond a limit; NaN is not."""
        too_high = self.bad_above is not None and value > self.bad_above
        return too_high or (self.bad_below is not None and value < self.bad_below)


LAG, ENVIRONMENT = "lag", "environment"
BOTH = LAG, ENVIRONMENT
_M = UpdateMetric
UPDATE_METRICS: dict[str, UpdateMetric] = {
    "policy_version": _M("The trainer's policy version", "none"),
    "queue_depth": _M("Groups read and waiting for a batch"),
    "reward": _M("Mean reward of the batch", "none", (ENVIRONMENT,)),
    "reward_std": _M("Standard deviation of a group's rewards, mean over the groups", "none", (), "reward's spread"),
    "completion_tokens": _M("Sampled tokens of a rollout, mean", "tokens", (ENVIRONMENT,), "tokens a rollout"),
    "truncated_frac": _M("Share of the rollouts that ended at the token limit", title="truncated", bad_above=0.2),
    "truncated_rollouts": _M("Rollouts of the batch that ended at the token limit", "rollouts"),
    "lag_mean": _M("Lag of sampled tokens at consumption, mean", "steps", (ENVIRONMENT,), "lag"),
    "loss": _M("Loss of the last batch", "none"),
    "grad_norm": _M("Gradient norm before clipping", "none", (), "gradient norm"),
    "learning_rate": _M("Learning rate of the last batch's first optimizer step", "none", (), "learning rate"),
    "entropy": _M("Mean token entropy of the current policy", title="entropy (nats)"),
    "policy_clipped_frac": _M("Share of tokens whose policy ratio was clipped", title="clip fraction", bad_above=0.1),
    "policy_clipped_low_frac": _M("Share of tokens whose policy ratio was clipped from below"),
    "policy_clipped_high_frac": _M("Share of tokens whose policy ratio was clipped from above"),
    "policy_dual_clipped_frac": _M("Share of tokens with a negative advantage that met the dual clip"),
    "total_weight_capped_frac": _M("Share of tokens whose ratio of current to behavior policy was capped"),
    "reference_kl": _M("Mean of the KL term to the reference model over tokens", title="KL to reference"),
    "teacher_kl": _M("Mean of the policy's minus the teacher's logprob, their reverse KL", title="KL to teacher"),
    "mismatch_lag0": _M(
        "Mean absolute gap between engine and trainer logprobs in rows of lag 0", title="mismatch at lag 0"
    ),
    "publish_blocked_s": _M(
        "Time that publications have held up the training, since the batch before", title="training held up",
        worse_above=limits.HELD_UP_S,
    ),
    "loss_scale": _M("Factor on the loss by which gradients pass through a float16 body", "none", title="loss scale"),
    "published_movement": _M(
        "Share of the masters' movement since the run began that the published policy has made", "share",
        title="movement made",
    ),
    "weight_changed_frac": _M(
        "Share of the policy's elements that the last published update has changed", title="changed by an update",
        worse_above=limits.DENSE,
    ),
    "weight_chunk_bytes": _M("Bytes of the last published update's chunks", title="bytes of an update"),
    "weight_chain": _M("Deltas since the newest anchor", "deltas"),
    "weight_redis_bytes": _M("Bytes of chunks of weights in Redis"),
    "num_tokens": _M("Tokens not older than twice max_lag", "tokens", (LAG,), "tokens"),
    "kl": _M("Mean of behavior minus proximal logprob, in nats", "nats", (LAG,), "mean log-ratio"),
    "k3_kl": _M(
        "k3 estimate of the KL divergence, in nats", "nats", (LAG,), "KL",
        worse_above=limits.KL_JUMP, bad_above=limits.KL_NOISE,
    ),
    "chi2": _M(
        "Chi-square of the tokens' ratios, from ratios before truncation", "none", BOTH, "χ²",
        worse_above=limits.CHI2_JUMP, bad_above=limits.CHI2_NOISE,
    ),
    "ess_fraction": _M(
        "Effective sample size over tokens, from ratios before truncation", "", BOTH, "ESS", bad_below=limits.LOW_ESS
    ),
    "applied_ess_fraction": _M("Effective sample size over tokens, from the weights applied", "", BOTH, "ESS applied"),
    "policy_chi2": _M("Chi-square of the tokens' ratios of current to proximal policy", "none", (LAG,), "policy χ²"),
    "policy_ess_fraction": _M(
        "Effective sample size over tokens, from the ratios of current to proximal policy", "", (LAG,), "policy ESS"
    ),
    "weight_mean": _M("Mean importance weight applied", "none", (LAG,), "weight"),
    "corrected_frac": _M(
        "Share of tokens not older than twice max_lag that the correction rejected or bounded", "", BOTH, "corrected",
        bad_above=0.5,
    ),
    "masked_frac": _M(
        "Share of the sampled tokens that are masked: older than twice max_lag, or rejected by the correction",
        "", BOTH, "masked", bad_above=limits.BEYOND_BOUND,
    ),
    "rejected_frac_positive": _M(
        "Share of tokens with an advantage above 0 that the correction rejected", "share", (LAG,),
        "rejected, advantage > 0", bad_above=0.5,
    ),
    "rejected_frac_negative": _M(
        "Share of tokens with an advantage below 0 that the correction rejected", "share", (LAG,),
        "rejected, advantage < 0", bad_above=0.5,
    ),
    "ratio_mean": _M("Mean ratio of proximal to behavior policy before truncation", "none"),
    "ratio_max": _M("Largest ratio of proximal to behavior policy of a token", "none"),
    "ratio_min": _M("Smallest ratio of proximal to behavior policy of a token", "none"),
    "chi2_seq_product": _M("Chi-square of the rows' ratios, products over their tokens", "none"),
    "clamp_log_ratio_new_old_indicator": _M("Share of a row's tokens above the threshold, mean over rows", "share"),
    "kl_new_old": _M("k3 of current to behavior policy, mean over a row's tokens, then over rows, in nats", "nats"),
    "k3_kl_unclamped": _M("k3 estimate of the KL divergence without a bound on a token's, in nats", "nats"),
    **{
        f"rollout_correction/{key}": metric
        for key, metric in {
            "kl": _M("Mean of behavior minus proximal logprob over tokens, in nats", "nats"),
            "k3_kl": _M(
                "k3 estimate of the KL divergence, a token's bounded at 10, in nats", "nats", (), "KL to behavior",
                worse_above=limits.KL_JUMP, bad_above=limits.KL_NOISE,
            ),
            "training_log_ppl": _M("Mean minus logprob of a row under the trainer's policy, in nats", "nats"),
            "rollout_log_ppl": _M("Mean minus logprob of a row under the engine's policies, in nats", "nats"),
            "log_ppl_diff": _M("Training less rollout log perplexity of a row, mean, in nats", "nats"),
            "log_ppl_abs_diff": _M("Absolute gap between the two log perplexities of a row, mean", "nats"),
            "log_ppl_diff_max": _M("Training less rollout log perplexity, largest of a row", "nats"),
            "log_ppl_diff_min": _M("Training less rollout log perplexity, smallest of a row", "nats"),
            "chi2_token": _M("Chi-square of the tokens' ratios of proximal to behavior policy", "none"),
            "chi2_seq": _M("Chi-square of the rows' ratios, geometric means over their tokens", "none"),
            "training_ppl": _M("Perplexity of the rows under the trainer's policy, mean over rows", "none"),
            "rollout_ppl": _M("Perplexity of the rows under the engine's policies, mean over rows", "none"),
            "ppl_ratio": _M("Training over rollout perplexity of a row, mean", "none"),
            "is_weight_mean": _M("Mean importance weight after the correction", "none"),
            "ess": _M("Effective sample size of weights clamped to the threshold and its inverse"),
            "clipped_frac": _M("Share of ratios above the importance threshold"),
        }.items()
    },
}  # fmt: skip
"""The table of what is measured of each update: another one is an entry here, and the line that sets its value."""
NAMES = {
    "queue_depth": "rollout_queue_groups",
    "grad_norm": "gradient_norm",
    "entropy": "entropy_nats",
    "policy_clipped_frac": "policy_ratio_clipped_frac",
    "policy_clipped_low_frac": "policy_ratio_clipped_low_frac",
    "policy_clipped_high_frac": "policy_ratio_clipped_high_frac",
    "policy_dual_clipped_frac": "policy_ratio_dual_clipped_frac",
    "reference_kl": "reference_kl_nats",
    "teacher_kl": "teacher_kl_nats",
    "mismatch_lag0": "mismatch_lag0_nats",
    "publish_blocked_s": "publish_blocked_seconds",
    "weight_chain": "weight_chain_deltas",
}
"""Names of gauges in Prometheus that are not made of their key."""
ONLY_SPLIT = ("num_tokens", "kl", "k3_kl", "lag_mean")
"""Keys without a number of the whole batch."""


def title_of(key: str) -> str:
    """Returns what reports, panels and live views call a number of an update."""
    return UPDATE_METRICS[key].title or key


def _gauges(by: str, name: str, help: str) -> dict[str, Metric]:
    """Returns the gauges that the label `by` splits. name, help: patterns of theirs."""
    return {
        key: Metric(prometheus_name(name.format(key)), help.format(metric.help), (by,), unit=metric.unit)
        for key, metric in UPDATE_METRICS.items()
        if by in metric.by
    }


TRAINER_GAUGES = {
    key: Metric(prometheus_name(NAMES.get(key, key)), metric.help, unit=metric.unit)
    for key, metric in UPDATE_METRICS.items()
    if key not in ONLY_SPLIT
}
"""Gauges of the last batch, by their key in a line of updates.jsonl. NaN if the batch has no such number."""

TRAINER_GAUGES_BY_LAG = _gauges(LAG, "{}_by_lag", "{}, by lag in optimizer steps")
"""Gauges of the last batch with a label `lag`. `kl` is `kl/lag_0` ... `kl/lag_8+` in updates.jsonl, see `lag_key`.

A bucket in which the batch has no token has no sample.
"""

TRAINER_GAUGES_BY_ENVIRONMENT = _gauges(ENVIRONMENT, "environment/{}", "{}, by environment")
"""Gauges of the last batch with a label `environment`, by their key in the tables of `environments` in updates.jsonl.

An environment without a group in the batch has no sample.
"""


def lag_label(lag: int) -> str:
    """Returns the bucket of a lag; for 0, that of a row without older tokens."""
    return LAG_LABELS[bisect_right(LAG_STARTS, lag) + (lag > 0)]


def part_key(part: str) -> str:
    """Returns the key of a reward part's mean in updates.jsonl and evaluations.jsonl."""
    return f"{REWARD}/{part}"


def pass_key(k: int) -> str:
    """Returns the key of pass@k in evaluations.jsonl."""
    return f"pass@{k}"


def error_key(key: str) -> str:
    """Returns the key of a figure's standard error in evaluations.jsonl."""
    return f"{key}_se"


def figures_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures in a line of evaluations.jsonl, or in an environment's table of it: `reward`, its parts and
    pass@k, without nulls."""
    return {key: value for key, value in line.items() if _FIGURE.fullmatch(key) and value is not None}


def figure_name(key: str) -> str:
    """Returns the display name of a reward's figure: `reward`, or the part's name for `reward/<part>`."""
    return key.removeprefix(part_key(""))


def parts_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reward's parts in a line of updates.jsonl or evaluations.jsonl, by name, without nulls."""
    start = part_key("")
    return {figure_name(key): value for key, value in line.items() if key.startswith(start) and value is not None}


def lag_key(name: str, label: str) -> str:
    """Returns the key of one lag bucket's number in updates.jsonl; `label` is one of LAG_LABELS."""
    return f"{name}/lag_{label}"
