"""The code and the run files on the pages work as they are."""

import importlib
import json
import re
import sys
import tomllib
from inspect import Parameter, isfunction, signature
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.consumers.learning import advantages
from penstock.consumers.learning.advantages import check_advantage
from penstock.consumers.learning.interfaces import LossInputs, Objective, check_objective
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.stream import curricula
from penstock.consumers.stream.history import TaskHistory
from penstock.consumers.stream.tasks import make_curriculum
from penstock.producers.interfaces import Environment
from penstock.producers.rollout.rewards import reward_components
from penstock.schemas.config import AdvantageConfig, CurriculumPlug, Plug, RunConfig, config_of
from penstock.schemas.process.plugins import construct
from penstock.schemas.prompt import Prompt

ROOT = Path(__file__).parents[2]
WHOLE = 'name = "example"\nmodel = { path = "/models/some" }\n'
ENVIRONMENT = {"environment": {"path": "my_lab.capitals:Capitals"}}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def configs(page: str) -> list[RunConfig]:
    """Returns every run file of a page; one that shows a single table is completed."""
    documents = [tomllib.loads(block) for block in blocks(page, "toml")]
    completed = [({} if "environments" in document else ENVIRONMENT) | document for document in documents]
    return [config_of(tomllib.loads(WHOLE) | document, Path(page)) for document in completed]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves the Python blocks of a page that begin with a file name, and makes them importable."""

    def save(page: str) -> None:
        for block in blocks(page, "python"):
            if named := re.match(r"# ([\w/]+\.py)\n", block):
                file = tmp_path / named[1]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block, encoding="utf-8")

    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        monkeypatch.delitem(sys.modules, name)
    return save


def test_the_environment_of_the_readme_poses_other_tasks_than_it_holds_out(lab: Any) -> None:
    lab("README.md")
    (config,) = configs("README.md")
    environment = construct(config.environment, "environment", Environment, seed=config.seed)
    trained = {environment.prompt(index).answer for index in range(1, 100)}
    held_out = {environment.evaluation_prompt(n).answer for n in range(1, environment.num_evaluation_prompts + 1)}
    assert len(held_out) == environment.num_evaluation_prompts
    assert not trained & held_out
    assert environment.reward(environment.prompt(1), f"It is {environment.prompt(1).answer}.") == 1.0
    assert environment.reward(environment.prompt(1), "I do not know.") == 0.0


def test_the_reward_function_of_its_page_is_called_with_its_arguments(lab: Any) -> None:
    lab("README.md")
    lab("docs/environments.md")
    [config] = [
        each for each in configs("docs/environments.md") if each.reward.path == "my_lab.rewards:short_and_right"
    ]
    environment = construct(config.environment, "environment", Environment, seed=0)
    (component,) = reward_components(config, environment, "environment")
    reward = component.function(Prompt(text="2+2=", answer="4"), "4")
    assert reward.value == pytest.approx(0.999)


def test_the_run_file_of_gsm8k_takes_its_lines_as_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [config] = [config for config in configs("docs/environments.md") if config.name == "gsm8k"]
    monkeypatch.chdir(tmp_path)
    for n, key in enumerate(("prompts_file", "evaluation_file")):
        file = Path(config.environment.kwargs[key])
        file.parent.mkdir(exist_ok=True)
        line = {"question": f"What is {n} and 7?", "answer": f"Added, it is <<{n}+7={n + 7}>>{n + 7}.\n#### {n + 7}"}
        file.write_text(json.dumps(line) + "\n")
    environment = construct(config.environment, "environment", Environment, seed=0)
    system, problem = environment.prompt(1).messages
    assert system.content.endswith(r"within \boxed{}.") and problem.content == "What is 0 and 7?"
    assert environment.evaluation_prompt(1).answer == "8"


def test_the_table_of_an_environment_of_verifiers_loads_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs/examples"))
    [config] = [each for each in configs("docs/agents.md") if each.environment.path.endswith("VerifiersEnvironment")]
    environment = construct(config.environment, "environment", Environment, seed=config.seed)
    assert config.endpoint is not None and environment.num_evaluation_prompts == 64
    assert environment.prompt(7) != environment.prompt(8)


def inputs(current: torch.Tensor) -> LossInputs:
    """Returns two rows of two tokens, the last token masked with NaN as its numbers."""
    mask = torch.tensor([True, True, True, False])
    return LossInputs(
        current_logprobs=current,
        proximal_logprobs=torch.tensor([-1.0, -0.7, -2.0, torch.nan]),
        behavior_logprobs=torch.tensor([-1.1, -0.7, -2.0, torch.nan]),
        importance_weights=torch.tensor([1.1, 1.0, 1.0, 0.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, torch.nan]),
        loss_mask=mask,
        entropy=torch.zeros(4),
        row_ids=torch.tensor([0, 0, 1, 1]),
        rollout_tokens=torch.full((4,), 2),
        denominator=4.0,
        num_rollouts=2,
    )


def test_the_objective_of_its_page_is_grpos_and_blind_to_what_is_masked(lab: Any) -> None:
    lab("docs/objectives.md")
    config = configs("docs/objectives.md")[3]
    own = construct(config.objective, "objective", Objective)
    check_objective(config, own)
    gradients = []
    for objective in (own, Grpo(clip_low=0.1, clip_high=0.1)):
        current = torch.tensor([-0.8, -0.75, -1.9, torch.nan], requires_grad=True)
        objective(inputs(current)).loss.backward()
        assert current.grad is not None
        gradients.append(current.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0][3] == 0


def test_the_advantages_of_their_page_fit_and_its_table_has_all_that_ship(lab: Any) -> None:
    lab("docs/objectives.md")
    check_advantage(AdvantageConfig(path="my_lab.advantage:only_the_good", kwargs={"least": 0.5}))
    check_advantage(configs("docs/objectives.md")[-1].advantage)
    page = (ROOT / "docs/objectives.md").read_text().partition("`penstock.consumers.learning.advantages:` |")[2]
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| (.*?) \|", page, re.M)
    shipped = {
        name: dict(list(signature(found).parameters.items())[1:])
        for name, found in vars(advantages).items()
        if isfunction(found) and next(iter(signature(found).parameters), "") == "rewards" and name[0] != "_"
    }
    assert {name for name, _ in rows} == shipped.keys()
    for name, settings in rows:
        for setting in re.findall(r"`([^`]*)`", settings):
            field, _, value = setting.partition(" = ")
            default = shipped[name][field].default
            assert default is Parameter.empty if not value else default == tomllib.loads(f"v = {value}")["v"]


def test_every_shipped_objective_of_the_page_takes_the_settings_beside_it() -> None:
    rows = re.findall(r"^\| \[`(\w+:\w+)`\]\([^)]*\) \| (.*) \|$", (ROOT / "docs/objectives.md").read_text(), re.M)
    assert len(rows) == 11
    for name, settings in rows:
        path = f"penstock.consumers.learning.objectives.{name}"
        built = construct(Plug(path=path), "objective", Objective)
        for setting in re.findall(r"`([^`]*)`", settings):
            field, _, value = setting.partition(" = ")
            found = getattr(built, field)
            assert found is None if not value else found == tomllib.loads(f"value = {value}")["value"], setting


def test_the_curriculum_of_its_page_fits_and_its_table_has_all_that_ship(lab: Any) -> None:
    lab("docs/environments.md")
    history = TaskHistory(4)
    for number in (1, 3, 1):
        history.release(number)
    own = make_curriculum(CurriculumPlug(path="my_lab.curricula:least_often"))
    assert own(history, 3, 0) == [2, 4, 3]
    rows = re.findall(r"^\| `(\w+)` \|.*?\|", section("docs/environments.md", "## Which tasks come next"), re.M)
    shipped = [
        name for name, kind in vars(curricula).items() if callable(kind) and kind.__module__ == curricula.__name__
    ]
    assert rows == [name for name in shipped if name[0] not in "_C"]
    for name in rows:
        chosen = make_curriculum(CurriculumPlug(path=f"{curricula.__name__}:{name}"))(history, 2, 0)
        assert len(set(chosen)) == 2


def section(page: str, head: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8").partition(head)[2].partition("\n## ")[0]


def test_every_shipped_environment_of_the_page_is_there() -> None:
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    for module, name in re.findall(r"^\| \[`(\w+):(\w+)`\]", page, re.M):
        assert hasattr(importlib.import_module(f"penstock.producers.environments.{module}"), name)
