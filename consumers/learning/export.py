"""A checkpoint's model as a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from penstock.consumers.learning.learner_state import MASTERS, check_masters
from penstock.consumers.learning.model import DTYPES, tensors_of
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.learning.tensor_files import read_tensors, specs_in


def export_model(
    tensors: Path, config: Path, folder: Path, dtype: str, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Writes the masters among the files of `tensors`, whole and in `dtype`, into `folder`, as `save_pretrained` does.

    No ranks are needed; the host's memory holds the model in float32.

    config: a folder with the model's config.json, and generation_config.json if it has one.

    Raises:
        OSError, SafetensorError: a file cannot be read or written.
        ConfigError: the tensors are not those of a model of this configuration.
    """
    transformers_logging.disable_progress_bar()
    settings = AutoConfig.from_pretrained(config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(settings, dtype=DTYPES[dtype])
    specs = specs_in(tensors)
    check_masters(tensors_of(module), specs, tensors)
    masters = {name: torch.empty(shape, dtype=of) for name, (shape, of) in specs.items() if name.startswith(MASTERS)}
    progress(f"reading {sum(master.nbytes for master in masters.values()) / 1e9:.2f} GB from {tensors}")
    read_tensors(masters, tensors, Ranks())
    weights = {}
    for name in list(masters):
        master = masters.pop(name)  # so that no more than one is in memory twice
        weights[name.removeprefix(MASTERS)] = master.to(DTYPES[dtype]) if master.is_floating_point() else master
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    if (config / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(config)
    progress(f"writing {folder} in {dtype}")
    module.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # safetensors leaves them to their owner, whatever the umask
        file.chmod((folder / "config.json").stat().st_mode & 0o777)
