"""The command `penstock parity`: opens its target, runs the check, shows the report. Also reports a gate's refusal."""

import os
import sys
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from cyclopts import Parameter
from cyclopts.types import PositiveInt

from penstock.consumers.parity.report import NOT_COMPARABLE, REPORT_FILE, Verdict
from penstock.deploy.launch.command_line import DEFAULT_RUNS, Json, Runs, Set, find_run_file, shipped_run_files
from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.deploy.parity.rollout_file import RolloutFileError, is_rollout_file
from penstock.schemas.config import ConfigError, load_config

if TYPE_CHECKING:
    from penstock.consumers.parity.report import ParityReport
    from penstock.deploy.launch.engine_output import Say
    from penstock.deploy.parity.inputs import ParityInput

_COULD_NOT_TELL = 2


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """The options of the command, with their help."""

    runs: Runs = DEFAULT_RUNS
    json: Json = False
    save: Annotated[Path | None, Parameter(help="record the rollouts in this file, their weights in FILE.weights")] = (
        None
    )
    out: Annotated[
        Path | None,
        Parameter(
            help="folder for parity.json, parity.svg and parity.png (default: the run's, the rollout file's, else here)"
        ),
    ] = None
    groups: Annotated[PositiveInt, Parameter(help="of a run, the newest N groups")] = 128
    wait: Annotated[float, Parameter(help="of a live run, wait so many seconds for them")] = 30.0
    max_tokens: Annotated[PositiveInt, Parameter(help="look at N sampled tokens")] = 50_000
    prompts: Annotated[PositiveInt, Parameter(help="of a run file, the prompts that its probe samples")] = 8
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        Parameter(help="where to recompute (default: cpu for a run, else trainer.device)"),
    ] = None
    model: Annotated[str | None, Parameter(help="of a rollout file, the base model if it has moved")] = None
    weights: Annotated[Path | None, Parameter(help="of a rollout file, its v<version>.safetensors files")] = None
    dtype: Annotated[str | None, Parameter(help="of a rollout file, the type of the published weights")] = None
    no_tokenizer: Annotated[bool, Parameter(help="leave out what needs the model's tokenizer")] = False
    set: Annotated[Set, Parameter(help="of a run file, override a field; may be repeated")] = ()


DEFAULTS = ParityOptions()


class _Opened(NamedTuple):
    """An opened target.

    out: folder of the results. device: as `trainer.device`.
    num_threads: for a run, those of its trainer; None keeps torch's default.
    capture: file with a probe's hidden states.
    """

    input: "ParityInput"
    out: Path
    device: str
    num_threads: int | None = None
    capture: Path | None = None


def command(target: str, /, *, options: Annotated[ParityOptions, Parameter(name="*")] = DEFAULTS) -> int:
    """Compare the engine's logprobs with the trainer's and name what is wrong. Status 0 parity, 1 mismatch, 2 could not
    tell, with one line on standard error.

    Args:
        target: a run (its name or folder), a run file (boots one engine and probes it), or a file of recorded rollouts
    """
    import redis

    from penstock.consumers.parity.report import ParityError
    from penstock.deploy.launch.engine_output import progress
    from penstock.deploy.launch.redis_server import ServerError
    from penstock.producers.interfaces import EngineError, WeightLoadError

    refused = (ParityError, RolloutFileError, ConfigError, ServerError, EngineError, WeightLoadError)
    say = progress(not options.json)
    try:
        with ExitStack() as closing:
            return _check(_open(Path(target), options, say, closing), options, say)
    except (*refused, redis.RedisError, OSError) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return _COULD_NOT_TELL
    except Exception:  # a defect of the check: Python's own status, 1, means a mismatch
        traceback.print_exc()
        return _COULD_NOT_TELL


def _open(target: Path, options: ParityOptions, say: "Say", closing: ExitStack) -> _Opened:
    if is_rollout_file(target):
        _refuse_others(target, "rollout file", options)
        return _open_rollout_file(target, options)
    if target.suffix == ".toml" or _is_shipped(target, options.runs):
        _refuse_others(target, "run file", options)
        return _open_probe(find_run_file(target), options, say, closing)
    if target.is_file():
        raise RolloutFileError(f"{target}: neither a run file (*.toml) nor a rollout file")
    if not target.exists() and len(target.parts) > 1:
        raise ConfigError(f"{target}: no such file; expected the name or folder of a run, a run file or a rollout file")
    _refuse_others(target, "run", options)
    return _open_run(target, options, say, closing)


def _is_shipped(target: Path, runs: Path) -> bool:
    """Returns whether the target is the name of a shipped run file and of no run."""
    is_run = target.exists() or (runs / target).exists() or "REDIS_URL" in os.environ
    return not is_run and str(target) in shipped_run_files()


_ONLY = {
    "groups": "run",
    "wait": "run",
    "prompts": "run file",
    "set": "run file",
    "model": "rollout file",
    "weights": "rollout file",
    "dtype": "rollout file",
}
"""The one kind of target that takes an option."""


def _refuse_others(target: Path, kind: str, options: ParityOptions) -> None:
    """Raises ConfigError for an option that the target would ignore."""
    for name, takes in _ONLY.items():
        given = getattr(options, name)
        if takes != kind and given != getattr(DEFAULTS, name):
            shown = given if name != "set" else given[0]
            raise ConfigError(f"--{name} {shown}: {target} is a {kind}, and only a {takes} takes that option")


def _open_rollout_file(file: Path, options: ParityOptions) -> _Opened:
    from penstock.deploy.parity.inputs import from_rollout_file

    found = from_rollout_file(file, model=options.model, folder=options.weights, dtype=options.dtype)
    return _Opened(found, options.out or file.parent, options.device or "auto")


def _open_probe(file: Path, options: ParityOptions, say: "Say", closing: ExitStack) -> _Opened:
    from penstock.deploy.launch.start_checks import check
    from penstock.deploy.parity.probe import run_probe
    from penstock.producers.interfaces import EngineError

    config = check(load_config(file, options.set)).config
    folder = _temporary(closing)
    out = options.out or Path()
    log = out / "parity-engine.log"
    try:
        probed = run_probe(config, folder, num_prompts=options.prompts, log=log, say=say)
    except EngineError as error:
        raise EngineError(f"{error} ({log} holds what the engine printed)") from error
    return _Opened(probed.input, out, options.device or config.trainer.device, capture=probed.capture)


def _open_run(target: Path, options: ParityOptions, say: "Say", closing: ExitStack) -> _Opened:
    from penstock.consumers.parity.logged_versions import LoggedVersions
    from penstock.deploy.operate.run_access import open_run
    from penstock.deploy.parity.inputs import from_run
    from penstock.schemas.weights.reading import WeightReader

    run = closing.enter_context(open_run(str(target), options.runs))
    if run.config is None or run.folder is None:
        raise ConfigError(
            f"{run.name}: its folder, with the run file, is not on this machine; expected --runs DIR to hold it"
        )
    reader = WeightReader(lambda command: command(run.redis), run.keys)
    weights = LoggedVersions(Path(run.config.model.path), _temporary(closing), reader)
    found = from_run(run, run.config, weights, num_groups=options.groups, wait_s=options.wait, say=say)
    threads = run.config.trainer.num_threads
    return _Opened(found, options.out or run.folder, options.device or "cpu", threads)


def _temporary(closing: ExitStack) -> Path:
    """Makes a folder for weights, on the disk that TMPDIR names."""
    return Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="penstock-parity-")))


def _check(opened: _Opened, options: ParityOptions, say: "Say") -> int:
    import torch

    from penstock.consumers.learning.model.device import choose_device
    from penstock.consumers.parity.check import check_parity
    from penstock.consumers.parity.report import EXIT_STATUS
    from penstock.deploy.parity.inputs import tokenizer_for

    found = opened.input
    if options.save is not None:
        say(found.save(options.save))
    tokenizer = None if options.no_tokenizer else tokenizer_for(found.config)
    if opened.num_threads is not None:
        torch.set_num_threads(opened.num_threads)
    device = choose_device(opened.device)
    say(f"computing {sum(len(group.rollouts) for group in found.groups):,} rollouts again, by the trainer's code")
    report = check_parity(
        found.groups,
        config=found.config,
        weights=found.weights,
        lag_of=found.lag_of,
        tokenizer=tokenizer,
        device=device,
        max_tokens=options.max_tokens,
    )
    report = msgspec.structs.replace(report, notes=(*found.notes, *report.notes))
    if opened.capture is not None:
        say("comparing layer by layer")
        report = _with_layers(report, found, opened.capture, device)
    _tell(report, opened, options, say)
    return EXIT_STATUS[report.verdict.status]


def _with_layers(report: "ParityReport", found: "ParityInput", capture: Path, device: object) -> "ParityReport":
    from penstock.consumers.parity.inference import captured_version, compare_layers
    from penstock.consumers.parity.layer_verdict import with_layers
    from penstock.consumers.parity.replay import PolicyStore

    try:
        model = PolicyStore(found.config, found.weights, device).model(captured_version(capture))  # type: ignore[arg-type]
        return with_layers(report, compare_layers(model, capture))
    except ConfigError as error:
        return msgspec.structs.replace(report, notes=(*report.notes, f"layers were not compared: {error}"))


def _tell(report: "ParityReport", opened: _Opened, options: ParityOptions, say: "Say") -> None:
    from penstock.deploy.parity.display import print_report, write_pictures

    say("drawing")
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    pictures = write_pictures(report, opened.out)
    (opened.out / "parity.json").write_bytes(encoded)
    if options.json:
        print(encoded.decode())
        return
    print_report(report, opened.input.title)
    print(f"\npicture  {pictures[1]}\nreport   {opened.out / 'parity.json'}")
    if options.save is not None:
        print(f"rollouts {options.save}")


class _GateReport(msgspec.Struct):
    """The part of the gate's report that is read here; others may hold null for NaN."""

    verdict: Verdict
    gate: str = ""


def gate_refusal(run_folder: Path, since_s: float) -> Verdict | None:
    """Returns why the trainer's gate refused to train; None if it has not since `since_s` (unix time)."""
    file = run_folder / REPORT_FILE
    try:
        if file.stat().st_mtime < since_s:
            return None
        report = msgspec.json.decode(file.read_bytes(), type=_GateReport)
    except (OSError, msgspec.DecodeError):
        return None  # the trainer's log, which is shown anyway, says why it ended
    is_refused = report.verdict.status == "mismatch" or report.verdict.cause == NOT_COMPARABLE
    return report.verdict if report.gate == "refuse" and is_refused else None


class GateRefusedError(RuntimeError):
    """The parity gate refused to train; the message says what to do."""


def raise_gate_refusal(run_folder: Path, since_s: float) -> None:
    """Prints why the gate refused to train, and raises GateRefusedError; returns if it did not refuse."""
    verdict = gate_refusal(run_folder, since_s)
    if verdict is None:
        return
    from penstock.deploy.parity.display import print_verdict

    print_verdict(verdict)
    print(f"report    {run_folder / REPORT_FILE}")
    raise GateRefusedError(
        "the parity gate refuses to train. Fix it, then continue with --resume, which samples anew what these engines "
        f"sampled. `penstock parity {run_folder / RUN_FILE}` looks closer; --set parity.gate=warn trains all the same"
    )
