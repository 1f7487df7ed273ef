"""A run file in TRL's terms.

Everything that costs time and that the run does not need is off: logging, checkpoints, the reference model (beta 0),
gradient checkpointing, mixed precision, data-loader workers. One batch is generated and trained in one piece.
"""

from datasets import Dataset
from trl import GRPOConfig

from penstock.producers.interfaces import Environment
from penstock.schemas.config import DEFAULT_ADVANTAGE, ConfigError, RewardConfig, RunConfig

GRPO_PATH = "penstock.consumers.learning.objectives.grpo:Grpo"


def training_rows(environment: Environment, num_rows: int) -> Dataset:
    """Returns the tasks 1, 2, ... in the order in which Penstock releases them."""
    prompts = [environment.prompt(index) for index in range(1, num_rows + 1)]
    if any(prompt.text is None for prompt in prompts):
        raise ConfigError("environment: this benchmark takes prompts of plain text, not chat messages")
    rows = {"prompt": [prompt.text for prompt in prompts], "answer": [prompt.answer for prompt in prompts]}
    return Dataset.from_dict(rows)


def trl_settings(config: RunConfig, max_updates: int, output_folder: str) -> GRPOConfig:
    """Translates the run file into TRL's settings.

    Raises:
        ConfigError: a setting has no counterpart.
    """
    objective = dict(config.objective.kwargs)
    if config.objective.path != GRPO_PATH:
        raise ConfigError(f"objective.path = {config.objective.path!r}: this benchmark compares {GRPO_PATH} only")
    if config.advantage.path != DEFAULT_ADVANTAGE or config.advantage.kl_coefficient:
        raise ConfigError(
            f"advantage = {config.advantage}: this benchmark compares {DEFAULT_ADVANTAGE} without KL only"
        )
    if config.teacher is not None:
        raise ConfigError("teacher: this benchmark compares learning from rewards; expected it to be left out")
    if config.reward != RewardConfig():
        raise ConfigError(f"reward = {config.reward}: this benchmark takes the environment's own reward")
    trainer = config.trainer
    if trainer.decay_steps is not None:
        raise ConfigError(f"trainer.decay_steps = {trainer.decay_steps}: this benchmark has no such schedule")
    clip_low = objective.get("clip_low", 0.2)
    return GRPOConfig(
        output_dir=output_folder,
        seed=config.seed,
        max_steps=max_updates if trainer.decay == "constant" else config.num_updates,
        # One batch, one piece: as many rollouts as Penstock trains in one optimizer step.
        per_device_train_batch_size=config.group_size * config.groups_per_batch,
        gradient_accumulation_steps=1,
        num_generations=config.group_size,
        num_iterations=1,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        # TRL's "dapo" is the mean over the batch's tokens, its "grpo" the mean of each rollout's mean.
        loss_type="dapo" if objective.get("aggregation", "token") == "token" else "grpo",
        epsilon=clip_low,
        epsilon_high=objective.get("clip_high", 0.2),
        delta=objective.get("dual_clip"),
        entropy_coef=objective.get("entropy_coefficient", 0.0),
        scale_rewards="group" if config.advantage.kwargs.get("normalize_std", True) else "none",
        learning_rate=trainer.learning_rate,
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        warmup_steps=trainer.warmup_steps,
        lr_scheduler_type="constant_with_warmup" if trainer.decay == "constant" else trainer.decay,
        optim="adamw_torch_fused",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
