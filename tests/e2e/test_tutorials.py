"""The cells of the tutorials on a real run whose second half was run by a user's program through `penstock.run`."""

from pathlib import Path

import matplotlib
import pytest

import penstock
from demo_run import DemoRun
from tutorial import cells, play, save_modules

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_cells_of_the_tutorials_show_a_real_run(
    resumed_run: DemoRun,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (models := tmp_path / "runs" / "models").mkdir(parents=True)
    (models / "demo").symlink_to(demo_model)
    (models.parent / resumed_run.name).symlink_to(resumed_run.folder)
    save_modules("python", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    first, *others = cells("python", resumed_run.name)
    *shown, resumed = others
    with pytest.raises(penstock.ConfigError, match="exists already"):
        play([first])  # all but the run itself, which is there
    names = play([f"import penstock\n{resumed}", *shown])
    said = capsys.readouterr().out
    num_updates = resumed_run.read("summary.json")["num_updates"]
    assert "already holds this model" in said and f"complete, with {num_updates} updates" in said
    assert names["result"].model.is_dir() and len(names["updates"]) == num_updates
    assert set(names["late"]["update"].to_pylist()) == {num_updates - n for n in range(5)}
    assert said.count(", expected ") == 3 and said.endswith("my_sums:nearly 3e-05\n")
    (health,) = cells("health", resumed_run.name)
    axes = play([health.replace('"fast"', repr(resumed_run.name))])["axes"]
    assert all(len(line.get_ydata()) == num_updates for panel in axes.flat for line in panel.lines)
