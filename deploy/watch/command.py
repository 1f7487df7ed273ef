"""`penstock watch RUN`: shows three views of a run in the terminal."""

from pathlib import Path

from penstock.deploy.launch.command_line import DEFAULT_RUNS, Run, Runs
from penstock.schemas.config import ConfigError


def command(run: Run, /, *, runs: Runs = DEFAULT_RUNS, once: bool = False) -> int:
    """Show a run in three views: flow, learning, off-policy (keys 1, 2, 3; q quits).

    Args:
        once: print all three views once, as without a terminal

    Raises:
        ConfigError: no run folder of this name, or a run file in it that cannot be read.
    """
    from rich.console import Console

    from penstock.deploy.operate.run_access import find_run
    from penstock.deploy.watch.gathering import Gatherer
    from penstock.deploy.watch.screen import all_views, watch

    if "://" in run:
        raise ConfigError(f"{run}: expected a run's name or folder; a run on other machines is shown by Grafana")
    if Path(run).is_file() and not (runs / run).is_dir():
        raise ConfigError(f"{run}: a file; expected a run's name or folder")
    _, folder, config = find_run(run, runs)
    if folder is None or config is None:
        raise ConfigError(
            f"{run}: no run folder in {runs}; a run whose folder is on other machines is shown by Grafana"
        )
    gatherer = Gatherer(folder, config)
    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(all_views(gatherer.gather(), console.width))
    else:
        watch(gatherer, console)
    return 0
