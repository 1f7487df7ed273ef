"""Names of every Prometheus metric, with its help text. Units are suffixes, by Prometheus' convention."""

from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LAG_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
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


class TrainerMetric:
    TOKEN_LAG = Metric("penstock_token_lag_steps", "Lag of sampled tokens at consumption", (), LAG_BUCKETS)
    TOKENS_TRAINED = Metric("penstock_tokens_trained_total", "Sampled tokens that reached the loss unmasked")
    TOKENS_MASKED = Metric("penstock_tokens_masked_total", "Sampled tokens masked, by reason", ("reason",))
    GROUPS_SETTLED = Metric("penstock_groups_settled_total", "Released indexes settled, by outcome", ("outcome",))
    GROUPS_RELEASED = Metric("penstock_groups_released_total", "Indexes released for the first time")
    GROUPS_RELEASED_AGAIN = Metric(
        "penstock_groups_released_again_total", "Indexes released again, by reason", ("reason",)
    )
    DUPLICATES = Metric("penstock_duplicates_dropped_total", "Groups dropped since their index was settled or in hand")
    POLICY_VERSION = Metric("penstock_policy_version", "The trainer's policy version")
    UPDATES = Metric("penstock_updates_total", "Batches consumed")
    STEPS_SKIPPED = Metric("penstock_steps_skipped_total", "Optimizer steps not taken, by reason", ("reason",))
    REWARD = Metric("penstock_reward", "Mean reward of the batch")
    ACCURACY = Metric("penstock_evaluation_reward", "Mean greedy reward on held-out prompts")
    ENTROPY = Metric("penstock_entropy_nats", "Mean token entropy of the current policy")
    KL = Metric("penstock_rollout_correction_kl", "Mean of behavior minus proximal logprob")
    K3_KL = Metric(
        "penstock_rollout_correction_k3_kl", "k3 estimate of the KL divergence of behavior and proximal policy"
    )
    CHI2 = Metric("penstock_rollout_correction_chi2_token", "Token chi-square of behavior and proximal policy")
    ESS = Metric("penstock_ess_fraction", "Effective sample size over tokens, from weights before truncation")
    CLIPPED = Metric(
        "penstock_rollout_correction_clipped_frac", "Share of tokens whose importance weight was truncated or masked"
    )
    POLICY_CLIPPED = Metric("penstock_policy_ratio_clipped_frac", "Share of tokens whose policy ratio was clipped")
    MISMATCH = Metric(
        "penstock_mismatch_lag0_nats", "Mean absolute gap between engine and trainer logprobs in rows of lag 0"
    )
    GRAD_NORM = Metric("penstock_gradient_norm", "Gradient norm before clipping")
    LOSS = Metric("penstock_loss", "Loss of the last batch")
    LEARNING_RATE = Metric("penstock_learning_rate", "Learning rate of the last step")
    QUEUE_DEPTH = Metric("penstock_rollout_queue_groups", "Groups read and waiting for a batch")
    PROMPTS = Metric("penstock_prompts_open", "Released prompts not yet appended")
    STEP_SECONDS = Metric("penstock_step_seconds", "Time per batch by phase", ("phase",), STEP_BUCKETS)
    WEIGHT_BYTES = Metric("penstock_weight_bytes_published_total", "Bytes of weights published")
    CHECKPOINT_SECONDS = Metric(
        "penstock_checkpoint_seconds", "Time to write and commit a checkpoint", (), STEP_BUCKETS
    )
    STREAM_ERRORS = Metric("penstock_trainer_stream_errors_total", "Redis commands that failed, by kind", ("kind",))
