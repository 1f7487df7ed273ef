"""`penstock push`: a run's model on the Hugging Face Hub, with a card of the run's figures."""

import tempfile
from pathlib import Path
from typing import Any

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.launch.run_folder import find_run_folder
from penstock.deploy.operate.export import export
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import table_rows
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.config import ConfigError, RunConfig, load_config


class HubError(RuntimeError):
    """The Hub refuses an upload or cannot be reached."""


def push_to_hub(
    run: str | Path,
    repo: str,
    *,
    checkpoint: str | int | None = None,
    private: bool = False,
    runs: str | Path = DEFAULT_RUNS,
) -> str:
    """Uploads a run's model to the Hub as one commit, with a model card of its figures. Returns the commit's URL.

    The token is that of `hf auth login`, or in HF_TOKEN.

    repo: `USER/NAME`; it is created if it is not there.
    checkpoint: as for `export`; by default the model of a complete run, else its newest checkpoint.
    private: of a repository that is created.

    Raises:
        ConfigError: no such run or checkpoint, or `repo` is no name of a repository.
        HubError: no token, or one that may not write there; no network.
        OSError: a file cannot be read.
    """
    check_repo(repo, "repo")
    folder = find_run_folder(run, runs)
    if checkpoint is None and (folder / "model").is_dir():
        return _upload(folder, folder / "model", repo, private=private)
    with tempfile.TemporaryDirectory() as scratch:
        export(folder, scratch, checkpoint=checkpoint, runs=runs)
        return _upload(folder, Path(scratch), repo, private=private)


def check_repo(repo: str, field: str) -> None:
    """Raises ConfigError if `repo` is no name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{field} = {repo!r}: {error}; expected USER/NAME") from None


def _upload(run_folder: Path, model: Path, repo: str, *, private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    config, summary = load_config(run_folder / "run.toml"), summarize(read_telemetry(run_folder))
    files = [file for file in sorted(model.iterdir()) if file.is_file() and file.name != "README.md"]
    added = [CommitOperationAdd(file.name, file) for file in files]
    added.append(CommitOperationAdd("README.md", model_card(repo, config, summary).encode()))
    api = HfApi()
    where = f"{repo} at {api.endpoint}"
    try:
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        message = f"Penstock run {config.name}, {summary['num_updates']} updates"
        return str(api.create_commit(created.repo_id, added, commit_message=message).commit_url)
    except LocalTokenNotFoundError:
        raise HubError(f"{where}: no token; expected one of `hf auth login` or in HF_TOKEN") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        helps = "expected a token that may write there (`hf auth login`, HF_TOKEN): " if status in (401, 403) else ""
        raise HubError(f"{where} refuses with status {status}: {helps}{' '.join(str(error).split())}") from None
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise HubError(f"{where} cannot be reached: {type(error).__name__}: {error}") from None
    except RuntimeError as error:  # of a large file, whatever went wrong
        raise HubError(f"{where}: {error} {' '.join(str(error.__cause__).split())}") from None


def model_card(repo: str, config: RunConfig, summary: dict[str, Any]) -> str:
    """Returns the text of README.md: metadata, what was trained on what, and the figures of the run. It names no folder
    of this machine but the last part of the base model's."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="transformers" if config.lora is None else "peft",
        pipeline_tag="text-generation",
        tags=["penstock", "reinforcement-learning", config.objective.path.rpartition(":")[2].lower()],
    )
    environments = ", ".join(f"`{each.path}`" for each in config.every_environment.values())
    held_out = [
        f"| held-out {name} | {value['initial']:.4f} | {value['final']:.4f} | {value['best']:.4f} |"
        for name, value in (summary["held_out"] or {}).items()
    ]
    return "\n".join([
        f"---\n{data.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}\n",
        f"`{Path(config.model.path).name}`, trained with reinforcement learning on {environments} by Penstock: "
        f"{summary['num_updates']} updates of {config.groups_per_batch} groups of {config.group_size}, "
        f"`{config.objective.path}`, learning rate {config.trainer.learning_rate:g}.\n",
        "| | before | after | best |",
        "|---|---|---|---|",
        *held_out,
        "\n| the run | |",
        "|---|---|",
        *(f"| {label.strip()} | {value} |" for label, value in table_rows(summary)),
        "",
    ])  # fmt: skip
