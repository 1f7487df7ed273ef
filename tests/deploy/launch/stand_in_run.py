"""`penstock run` with stand-ins for its parts: `stand_in_run.py RUNS NAME BOOTS_AT_ONCE PART=BEHAVIOR...`."""

import sys
from pathlib import Path

from penstock.deploy.launch import launcher
from penstock.deploy.launch.launcher import Launcher
from penstock.deploy.launch.live_view import open_view
from penstock.deploy.launch.machine import Gpu
from penstock.deploy.launch.placement import DeviceShare, Placement
from penstock.deploy.launch.producer_pool import PartDied
from penstock.deploy.launch.run_folder import RunFolder
from penstock.schemas.config import EnvironmentConfig, ModelConfig, ProducersConfig, RunConfig

STAND_IN = Path(__file__).with_name("stand_in.py")
PLACEMENT = Placement(
    tuple(
        DeviceShare(part, part, Gpu(number, "", "", 1, 1, ""), {})
        for number, part in enumerate(("trainer", "producer-0", "producer-1"))
    ),
    engine_fraction=0.5,
)


def launch(runs: Path, name: str, behaviors: dict[str, str]) -> int:
    config = RunConfig(
        name=name,
        num_updates=5,
        model=ModelConfig(path="model"),
        environment=EnvironmentConfig(path="penstock.producers.environments.arithmetic:Arithmetic"),
        producers=ProducersConfig(count=2),
    )

    def command_for(part: str, config: RunConfig, runs: Path, resume: bool) -> list[str]:
        return [sys.executable, str(STAND_IN), part, str(config.folder(runs)), behaviors.get(part, "run")]

    with RunFolder(config, runs, resume=False) as folder, open_view(config, runs) as view:
        folder.save(config)
        return Launcher(
            config, runs, PLACEMENT, resume=False, view=view, lock=folder.lock, command_for=command_for
        ).run()


if __name__ == "__main__":
    launcher.boots_at_once = lambda config: int(sys.argv[3])  # whatever this machine's cores allow
    try:
        sys.exit(launch(Path(sys.argv[1]), sys.argv[2], dict(pair.split("=") for pair in sys.argv[4:])))
    except PartDied as death:
        sys.exit(f"penstock: {death}")
