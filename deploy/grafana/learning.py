"""Learning: does it learn, and is it healthy?"""

from penstock.deploy.grafana.panels import Row, dashboard, last, limits_of, of_update, timeseries
from penstock.schemas.config import TrainerConfig

OUTCOME = [
    timeseries(
        "Reward and held-out reward",
        "Mean reward of a batch, and of answers to held-out prompts. They should rise together: a growing "
        "gap means a reward that pays for something else, a fall after a rise is a collapse.",
        {"reward": last("penstock_reward"), "held-out": last("penstock_evaluation_reward")},
        unit="short",
        minimum=None,
    ),
    timeseries(
        "Parts of the reward",
        "Mean of each part that the reward names: of a batch, and of answers to held-out prompts.",
        {
            "{{part}}": last("penstock_reward_part", by="part"),
            "held-out {{part}}": last("penstock_evaluation_reward_part", by="part"),
        },
        unit="short",
        minimum=None,
    ),
    of_update("reward_std", "Advantages are made of it: at 0 nothing is left to learn from."),
    timeseries(
        "Groups without variance",
        "Share of the groups whose siblings all have one reward, from which nothing is learned: tasks are too easy "
        "or too hard.",
        {
            "skipped": (
                'sum(rate(penstock_groups_settled_total{run="$run", outcome="skipped"}[1m])) / '
                '(sum(rate(penstock_groups_settled_total{run="$run"}[1m])) > 0)'
            )
        },
        limits={0.8: "red"},
        maximum=1,
    ),
    of_update("completion_tokens", "Mean over a batch. A steady rise is a reward that pays for length."),
    of_update(
        "truncated_frac",
        "Share of the rollouts that ended at the token limit: answers that would have been right are scored as wrong.",
        maximum=1,
    ),
]
POLICY = [
    of_update(
        "entropy",
        "It falls slowly while reward rises; a plunge to 0 before that is a policy that has stopped to explore.",
    ),
    timeseries(
        "KL to the policies that sampled",
        "Per token. It grows with lag, and with an engine that differs. Orange is about where the alert for χ² "
        "begins to look; from red on there is more noise than signal.",
        {"k3": last("penstock_rollout_correction_k3_kl"), "mean log-ratio": last("penstock_rollout_correction_kl")},
        unit="suffix: nats",
        minimum=None,
        **limits_of("rollout_correction/k3_kl"),
    ),
    timeseries(
        "KL to the reference model and a teacher",
        "Per token; empty where the run has none. To the reference: what is much depends on the task, a steep rise "
        "without reward is a policy gone astray. To a teacher it falls while the policy learns.",
        {"reference model": last("penstock_reference_kl_nats"), "teacher": last("penstock_teacher_kl_nats")},
        unit="suffix: nats",
    ),
    timeseries(
        "Clip fraction",
        "Share of the tokens whose policy ratio was clipped. A few per cent are normal; a rising share means too "
        "large a step.",
        {
            "clipped": last("penstock_policy_ratio_clipped_frac"),
            "above the range": last("penstock_policy_ratio_clipped_high_frac"),
            "below the range": last("penstock_policy_ratio_clipped_low_frac"),
        },
        **limits_of("policy_clipped_frac"),
    ),
]
OPTIMIZER = [
    of_update(
        "grad_norm",
        "Before clipping, which begins at 1 unless `trainer.max_grad_norm` says otherwise. A trend upwards calls "
        "for a lower learning rate.",
        limits={TrainerConfig().max_grad_norm: "orange"},
    ),
    of_update("learning_rate", "At the last batch's first optimizer step.", unit="sci"),
    of_update(
        "published_movement",
        "Of a 16-bit policy: how much of what the float32 weights have moved it shows. Well below 1 updates drown in "
        "rounding.",
    ),
    of_update("loss_scale", "With model.dtype = float16: halved when gradients overflow, doubled after 50 steps."),
    of_update("loss", "Only that it is finite says something: its level depends on the objective.", minimum=None),
    timeseries(
        "Steps not taken",
        "By reason, since the trainer's start. Any but `nothing left to train` deserves a look at once.",
        {"{{reason}}": 'sum by (reason) (penstock_steps_skipped_total{run="$run"})'},
        unit="suffix: steps",
        limits={1: "red"},
    ),
]

DASHBOARD = dashboard(
    "penstock-learning",
    "Penstock / Learning",
    "Does it learn, and is it healthy? Values are those of the batch that the trainer has consumed last.",
    {"Outcome": Row(OUTCOME, (12, 12, 6)), "Policy": Row(POLICY, (6,)), "Optimizer": Row(OPTIMIZER, (12,))},
)
