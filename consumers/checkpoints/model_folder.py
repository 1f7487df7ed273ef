"""A checkpoint's model as a Hugging Face folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from penstock.schemas.best import BEST_FILE

TENSORS_FOLDER = "tensors"
MODEL_FOLDER = "model"
"""In each checkpoint, without weights; in the folder of a run that is complete, with them."""
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*processor_config.json",
)

Export = Callable[[Path, Path, Path, str], None]
"""`penstock.consumers.learning.model.export.export_model`: tensors, configuration, new folder, type."""


def export_checkpoint(checkpoint: Path, folder: Path, dtype: str, export: Export) -> None:
    """Exports the model of a whole checkpoint, or of the best model's folder, as a Hugging Face folder: whole or not at
    all, in place of an existing one.

    Raises:
        OSError: for example, the disk is full.
        ConfigError: the checkpoint's `model/` and its tensors belong to different models.
    """
    is_best = (checkpoint / BEST_FILE).is_file()
    tensors, files = (checkpoint, checkpoint) if is_best else (checkpoint / TENSORS_FOLDER, checkpoint / MODEL_FOLDER)
    partial = folder.with_name(f"partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        export(tensors, files, partial, dtype)
        copy_model_files(files, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_model_files(base: Path, folder: Path) -> None:
    """Copies a model's configuration and tokenizer files, except those that `folder` already has."""
    for pattern in _MODEL_FILES:
        for file in base.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
