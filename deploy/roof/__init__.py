"""The commands of `penstock` as Python functions; docs/tutorials/python.md shows how to use them.

Arguments are named like the command's options: where a message says `--resume`, Python has `resume=True`. Nothing is
imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.deploy.demo.make_model import make_model as make_model
    from penstock.deploy.evaluate.evaluation import Evaluated as Evaluated
    from penstock.deploy.evaluate.evaluation import SetResult as SetResult
    from penstock.deploy.launch.producer_pool import PartDied as PartDied
    from penstock.deploy.launch.redis_server import ServerError as ServerError
    from penstock.deploy.operate.audit import audit as audit
    from penstock.deploy.operate.dead_letters import list_dead as list_dead
    from penstock.deploy.operate.dead_letters import requeue_dead as requeue_dead
    from penstock.deploy.operate.dead_letters import show_dead as show_dead
    from penstock.deploy.operate.export import export as export
    from penstock.deploy.operate.hub import HubError as HubError
    from penstock.deploy.operate.hub import push_to_hub as push_to_hub
    from penstock.deploy.operate.producer_list import list_producers as list_producers
    from penstock.deploy.operate.run_list import list_runs as list_runs
    from penstock.deploy.operate.weight_list import list_weights as list_weights
    from penstock.deploy.parity.command import GateRefusedError as GateRefusedError
    from penstock.deploy.record.reading import export_record as export_record
    from penstock.deploy.record.reading import load_record as load_record
    from penstock.deploy.report.lines import TelemetryError as TelemetryError
    from penstock.deploy.results import RunResult as RunResult
    from penstock.deploy.results import load_evaluations as load_evaluations
    from penstock.deploy.results import load_updates as load_updates
    from penstock.deploy.results import report as report
    from penstock.deploy.running import EngineError as EngineError
    from penstock.deploy.running import RunInterrupted as RunInterrupted
    from penstock.deploy.running import check as check
    from penstock.deploy.running import evaluate as evaluate
    from penstock.deploy.running import load_config as load_config
    from penstock.deploy.running import run as run
    from penstock.deploy.running import try_environment as try_environment
    from penstock.schemas.config import ConfigError as ConfigError
    from penstock.schemas.config import RunConfig as RunConfig

_NAMES = {
    "deploy.demo.make_model": ("make_model",),
    "deploy.evaluate.evaluation": ("Evaluated", "SetResult"),
    "deploy.launch.producer_pool": ("PartDied",),
    "deploy.launch.redis_server": ("ServerError",),
    "deploy.operate.audit": ("audit",),
    "deploy.operate.dead_letters": ("list_dead", "requeue_dead", "show_dead"),
    "deploy.operate.export": ("export",),
    "deploy.operate.hub": ("HubError", "push_to_hub"),
    "deploy.operate.producer_list": ("list_producers",),
    "deploy.operate.run_list": ("list_runs",),
    "deploy.operate.weight_list": ("list_weights",),
    "deploy.parity.command": ("GateRefusedError",),
    "deploy.record.reading": ("export_record", "load_record"),
    "deploy.report.lines": ("TelemetryError",),
    "deploy.results": ("RunResult", "load_evaluations", "load_updates", "report"),
    "deploy.running": ("EngineError", "RunInterrupted", "check", "evaluate", "load_config", "run", "try_environment"),
    "schemas.config": ("ConfigError", "RunConfig"),
}  # fmt: skip
_MODULES = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
