"""Names of every Prometheus metric, with its help text. Units are suffixes, by Prometheus' convention."""

from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LAG_LABELS = ("0", "1", "2-3", "4-7", "8+")
"""The lag buckets of the mismatch diagnostics, in optimizer steps: values of the label `lag`."""
TOKEN_LAG_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
PAUSE_BUCKETS = (0.005, 0.01, 0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class ProducerMetric:
    TOKENS_GENERATED = Metric("penstock_tokens_generated_total", "Tokens sampled")
    GROUPS_APPENDED = Metric("penstock_groups_appended_total", "Groups appended to the rollout stream", ("kind",))
    EVALUATIONS_APPENDED = Metric("penstock_evaluations_appended_total", "Evaluation groups answered")
    IN_FLIGHT = Metric("penstock_groups_in_flight", "Groups being generated now")
    POLICY_VERSION = Metric("penstock_producer_policy_version", "Policy version held by the engine")
    POLICY_BEHIND = Metric("penstock_producer_policy_behind_steps", "Announced version minus the version held")
    PAUSE = Metric("penstock_weight_pause_seconds", "Time without sampling per weight update", (), PAUSE_BUCKETS)
    PREFETCH = Metric(
        "penstock_weight_prefetch_seconds", "Time to read and verify weights while sampling", (), PAUSE_BUCKETS
    )
    WEIGHT_BYTES = Metric("penstock_weight_bytes_total", "Bytes of weights loaded")
    WEIGHT_LOADS = Metric("penstock_weight_loads_total", "Weight updates by result", ("result",))
    STREAM_ERRORS = Metric("penstock_stream_errors_total", "Redis commands that failed, by kind", ("kind",))
    REWARD_ERRORS = Metric("penstock_reward_errors_total", "Groups whose reward raised or was not finite")
    AGENT_ROLLOUTS = Metric("penstock_agent_rollouts_total", "Rollouts of agents that ended, by outcome", ("outcome",))
    AGENT_ROLLOUTS_OPEN = Metric("penstock_agent_rollouts_open", "Rollouts of agents that are open")
    AGENT_CALLS_RUNNING = Metric("penstock_agent_calls_running", "Calls of agents that are being answered")
    AGENT_CALLS = Metric(
        "penstock_agent_calls_total", "Calls of agents answered, by how their prompt came about", ("prompt",)
    )
    AGENT_SEGMENTS = Metric(
        "penstock_agent_segments_total", "Segments opened after a rollout's first, by reason", ("reason",)
    )
    ALTERNATE_STOPS = Metric(
        "penstock_agent_alternate_stops_total", "Answers that a stop token other than the end of sequence has ended"
    )
    AGENT_TOKENS = Metric("penstock_agent_tokens_total", "Tokens sampled for agents in rollouts that ended")
    AGENT_TOKENS_DELIVERED = Metric(
        "penstock_agent_tokens_delivered_total", "Those of them that stand in a group handed to the stream"
    )


class TrainerMetric:
    """Beside these the trainer serves `TRAINER_GAUGES` and `TRAINER_GAUGES_BY_LAG`."""

    TOKEN_LAG = Metric("penstock_token_lag_steps", "Lag of sampled tokens at consumption", (), TOKEN_LAG_BUCKETS)
    TOKENS_TRAINED = Metric("penstock_tokens_trained_total", "Sampled tokens that reached the loss unmasked")
    TOKENS_MASKED = Metric(
        "penstock_tokens_masked_total", "Sampled tokens masked: beyond the lag bound, or by the correction", ("reason",)
    )
    GROUPS_SETTLED = Metric("penstock_groups_settled_total", "Released indexes settled, by outcome", ("outcome",))
    GROUPS_RELEASED = Metric("penstock_groups_released_total", "Indexes released for the first time")
    GROUPS_RELEASED_AGAIN = Metric(
        "penstock_groups_released_again_total", "Indexes released again, by reason", ("reason",)
    )
    DUPLICATES = Metric("penstock_duplicates_dropped_total", "Groups dropped since their index was settled or in hand")
    UPDATES = Metric("penstock_updates_total", "Batches consumed")
    OPTIMIZER_STEPS = Metric("penstock_optimizer_steps_total", "Optimizer steps taken")
    STEPS_SKIPPED = Metric("penstock_steps_skipped_total", "Optimizer steps not taken, by reason", ("reason",))
    ACCURACY = Metric("penstock_evaluation_reward", "Mean greedy reward on held-out prompts")
    PROMPTS = Metric("penstock_prompts_open", "Released prompts not yet appended")
    OBJECTIVE = Metric("penstock_objective", "What the objective reports beyond the metrics named here", ("name",))
    STEP_SECONDS = Metric("penstock_step_seconds", "Time per batch by phase", ("phase",), STEP_BUCKETS)
    WEIGHT_BYTES = Metric("penstock_weight_bytes_published_total", "Bytes of weights published")
    CHECKPOINT_SECONDS = Metric(
        "penstock_checkpoint_seconds", "Time to write and commit a checkpoint", (), STEP_BUCKETS
    )
    PARITY_ALERT = Metric(
        "penstock_trainer_parity_alert", "1 while the gap between engine and trainer at lag 0 is outside its tolerance"
    )
    STREAM_ERRORS = Metric("penstock_trainer_stream_errors_total", "Redis commands that failed, by kind", ("kind",))


def prometheus_name(key: str) -> str:
    """The name of a diagnostic in Prometheus; `key` is its name in a line of updates.jsonl."""
    return "penstock_" + key.replace("/", "_")


TRAINER_GAUGES: dict[str, Metric] = {
    "policy_version": Metric("penstock_policy_version", "The trainer's policy version"),
    "queue_depth": Metric("penstock_rollout_queue_groups", "Groups read and waiting for a batch"),
    "reward": Metric("penstock_reward", "Mean reward of the batch"),
    "loss": Metric("penstock_loss", "Loss of the last batch"),
    "grad_norm": Metric("penstock_gradient_norm", "Gradient norm before clipping"),
    "learning_rate": Metric("penstock_learning_rate", "Learning rate of the last step"),
    "entropy": Metric("penstock_entropy_nats", "Mean token entropy of the current policy"),
    "policy_clipped_frac": Metric(
        "penstock_policy_ratio_clipped_frac", "Share of tokens whose policy ratio was clipped"
    ),
    "policy_clipped_low_frac": Metric("penstock_policy_ratio_clipped_low_frac", "The same, below the range"),
    "policy_clipped_high_frac": Metric("penstock_policy_ratio_clipped_high_frac", "The same, above the range"),
    "policy_dual_clipped_frac": Metric(
        "penstock_policy_ratio_dual_clipped_frac", "Share of tokens with a negative advantage that met the dual clip"
    ),
    "total_weight_capped_frac": Metric(
        "penstock_total_weight_capped_frac", "Share of tokens whose ratio of current to behavior policy was capped"
    ),
    "reference_kl": Metric("penstock_reference_kl_nats", "Mean of the KL term to the reference model over tokens"),
    "mismatch_lag0": Metric(
        "penstock_mismatch_lag0_nats", "Mean absolute gap between engine and trainer logprobs in rows of lag 0"
    ),
    **{
        key: Metric(prometheus_name(key), help)
        for key, help in {
            "rollout_correction/kl": "Mean of behavior minus proximal logprob over tokens, in nats",
            "rollout_correction/k3_kl": "k3 estimate of the KL divergence, a token's bounded at 10, in nats",
            "rollout_correction/chi2_token": "Chi-square of the tokens' ratios of proximal to behavior policy",
            "rollout_correction/chi2_seq": "Chi-square of the rows' ratios, geometric means over their tokens",
            "rollout_correction/training_ppl": "Perplexity of the rows under the trainer's policy, mean over rows",
            "rollout_correction/training_log_ppl": "Mean minus logprob of a row under the trainer's policy, in nats",
            "rollout_correction/rollout_ppl": "Perplexity of the rows under the engine's policies, mean over rows",
            "rollout_correction/rollout_log_ppl": "Mean minus logprob of a row under the engine's policies, in nats",
            "rollout_correction/log_ppl_diff": "Training less rollout log perplexity of a row, mean, in nats",
            "rollout_correction/log_ppl_abs_diff": "Absolute gap between the two log perplexities of a row, mean",
            "rollout_correction/log_ppl_diff_max": "Training less rollout log perplexity, largest of a row",
            "rollout_correction/log_ppl_diff_min": "Training less rollout log perplexity, smallest of a row",
            "rollout_correction/ppl_ratio": "Training over rollout perplexity of a row, mean",
            "rollout_correction/is_weight_mean": "Mean importance weight after the correction",
            "rollout_correction/ess": "Effective sample size of weights clamped to the threshold and its inverse",
            "rollout_correction/clipped_frac": "Share of ratios above the importance threshold",
            "kl_new_old": "k3 of current to behavior policy, mean over a row's tokens, then over rows, in nats",
            "clamp_log_ratio_new_old_indicator": "Share of a row's tokens above the threshold, mean over rows",
            "ess_fraction": "Effective sample size over tokens, from ratios before truncation",
            "applied_ess_fraction": "Effective sample size over tokens, from the weights applied",
            "chi2": "Chi-square of the tokens' ratios, from ratios before truncation",
            "weight_mean": "Mean importance weight applied",
            "corrected_frac": "Share of tokens within the lag bound that the correction rejected or bounded",
            "masked_frac": "Share of tokens within the lag bound that the correction rejected",
            "masked_frac_positive": "The same of tokens with an advantage above 0",
            "masked_frac_negative": "The same of tokens with an advantage below 0",
            "ratio_mean": "Mean ratio of proximal to behavior policy before truncation",
            "ratio_max": "Largest ratio of proximal to behavior policy of a token",
            "ratio_min": "Smallest ratio of proximal to behavior policy of a token",
            "k3_kl_unclamped": "k3 estimate of the KL divergence without a bound on a token's, in nats",
            "chi2_seq_product": "Chi-square of the rows' ratios, products over their tokens",
        }.items()
    },
}
"""Gauges of the last batch, by their key in a line of updates.jsonl. NaN where the batch has no such number."""

TRAINER_GAUGES_BY_LAG: dict[str, Metric] = {
    key: Metric(prometheus_name(key) + "_by_lag", help + ", by lag in optimizer steps", ("lag",))
    for key, help in {
        "num_tokens": "Tokens within the lag bound",
        "kl": "Mean of behavior minus proximal logprob, in nats",
        "k3_kl": "k3 estimate of the KL divergence, in nats",
        "chi2": "Chi-square of the tokens' ratios",
        "ess_fraction": "Effective sample size over tokens before truncation",
        "applied_ess_fraction": "Effective sample size over tokens of the weights applied",
        "weight_mean": "Mean importance weight applied",
        "corrected_frac": "Share of tokens that the correction rejected or bounded",
        "masked_frac": "Share of tokens that the correction rejected",
        "masked_frac_positive": "Share of tokens rejected of those with an advantage above 0",
        "masked_frac_negative": "Share of tokens rejected of those with an advantage below 0",
    }.items()
}
"""Gauges of the last batch with a label `lag`. `kl` is `kl/lag_0` ... `kl/lag_8+` in updates.jsonl, see `lag_key`.

A bucket in which the batch has no token has no sample.
"""


def lag_key(name: str, label: str) -> str:
    """The key of one lag bucket's number in updates.jsonl; `label` one of LAG_LABELS."""
    return f"{name}/lag_{label}"
