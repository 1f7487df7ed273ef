"""A run in TRL's terms.

Everything that costs time and that the run does not need is off: logging, checkpoints, the reference model (beta 0),
gradient checkpointing, mixed precision, data-loader workers. One batch is generated in one piece.
"""

from datasets import Dataset
from trl import GRPOConfig

from penstock.producers.interfaces import Environment
from penstock.schemas.config import RunConfig
from penstock.schemas.prompt import Prompt


def training_rows(environment: Environment, num_rows: int) -> Dataset:
    """Returns the tasks 1, 2, ... in the order in which Penstock releases them."""
    tasks = range(1, num_rows + 1)
    prompts = [environment.prompt(index) for index in tasks]
    rows = {"prompt": [prompt.text if prompt.messages is None else conversation(prompt) for prompt in prompts]}
    return Dataset.from_dict({**rows, "task": list(tasks)})


def conversation(prompt: Prompt) -> list[dict[str, str]]:
    """Returns a prompt's messages as chat templates take them."""
    return [message.openai for message in prompt.messages or ()]


def trl_settings(config: RunConfig, max_updates: int, output_folder: str, pieces: int) -> GRPOConfig:
    """Translates a run with GRPO, token means and a learning rate that is constant or falls over all of the run, as
    all that are measured here have. pieces: passes of a batch."""
    trainer = config.trainer
    return GRPOConfig(
        output_dir=output_folder,
        seed=config.seed,
        max_steps=max_updates,
        # As many rollouts as Penstock trains in one optimizer step; all are sampled at once.
        per_device_train_batch_size=config.group_size * config.groups_per_batch // pieces,
        gradient_accumulation_steps=pieces,
        num_generations=config.group_size,
        num_iterations=1,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        # TRL's "dapo" is the mean over the batch's tokens.
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.2,
        scale_rewards="group",
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
