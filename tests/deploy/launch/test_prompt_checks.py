"""A dry run finds what would let every group die: prompts that do not fit the model, parts that no reward has."""

import json
import os

import pytest

from penstock.deploy import running
from penstock.deploy.demo.char_tokenizer import build_tokenizer
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.producers.rollout.episode import load_tokenizer, tokenize
from penstock.schemas.config import ConfigError
from penstock.schemas.prompt import Message, Prompt, Reward
from wire_examples import PNG

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking | default(true) %}0{% endif %}"


class SumsInRoles(Arithmetic):
    """Poses sums as `roles`, of which the second kind comes from the third task on."""

    def __init__(self, *, seed: int, roles: tuple[str, ...] = (), later: tuple[str, ...] | None = None) -> None:
        super().__init__(seed=seed, width=2, num_evaluation_prompts=4)
        self._roles, self._later = roles, roles if later is None else later

    def prompt(self, index: int) -> Prompt:
        roles = self._later if index > 2 else self._roles
        return (
            Prompt(messages=tuple(Message(role=role, content="1+1=") for role in roles), answer="2")
            if roles
            else Prompt(text="1+1=", answer="2")
        )

    def evaluation_prompt(self, n: int) -> Prompt:
        return self.prompt(n)


class SumsWithoutParts(SumsInRoles):
    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return Reward(value=1.0)


class SumsInPictures(SumsInRoles):
    def prompt(self, index: int) -> Prompt:
        parts = [{"type": "image", "image": file} for file in (PNG, PNG[:50])]
        return Prompt(messages=(Message(role="user", content=parts),), answer="2")


class SumsByHash(SumsInRoles):
    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{hash(str(index))}=", answer="2")


class SumsOfOneProcess(SumsInRoles):
    def __init__(self, *, seed: int, first: int) -> None:
        super().__init__(seed=seed)
        print("opened")
        if os.getpid() != first:
            raise OSError("port 8000 is taken")


class SumsOfWords(SumsInRoles):
    def reward(self, prompt: Prompt, completion: str) -> str:  # type: ignore[override]
        return "right"


def settings(model_folder, **environment: object) -> dict[str, object]:
    plug = {"path": f"{__name__}:SumsInRoles", **environment}
    return {"name": "r", "model": {"path": str(model_folder)}, "environment": plug, "sampling": {"max_tokens": 4}}


PARTS = {"path": f"{__name__}:SumsWithoutParts"}
# fmt: off
REFUSED = (
    ({"kwargs": {"roles": ["user"]}}, None, {}, r"prompt\(1\) has messages, .* no chat template; expected a"),
    ({"kwargs": {"later": ["user"]}}, None, {}, r"prompt\(3\) has messages"),
    ({"kwargs": {"roles": ["system", "user"]}}, NO_SYSTEM, {},
     r"prompt\(1\): the chat template of .* roles system, user: TemplateError: System role not supported; exp"),
    ({}, NO_SYSTEM, {"engine.max_model_len": 4},
     r"prompt\(1\) has 4 tokens; expected fewer than engine.max_model_len = 4"),
    ({}, NO_SYSTEM, {"engine.max_model_len": 65}, r"engine.max_model_len = 65: .* has a context of 64 tokens"),
    ({}, None, {"endpoint.port": 0}, r"its tokenizer has no chat template, which \[endpoint\] needs"),
    ({}, None, {"checkpoint.best": "reward/exakt"},
     r"best = 'reward/exakt': the reward .*; expected reward or reward/digits or"),
    ({}, None, {"evaluation.goal": {"figure": "reward/x", "value": 1}}, r"evaluation.goal.figure = 'reward/x': the"),
    ({}, None, {"checkpoint.best": "environments/main/reward/x"}, r"'environments/main/reward/x': the reward has no"),
    (PARTS, None, {"checkpoint.best": "reward/x"}, r"no such part; expected reward$"),
    ({"kwargs": {"roles": ["user"]}}, THINKS, {"checkpoint.best": "reward/exakt", "endpoint.port": 0},
     r"best = 'reward/exakt': the reward .*; expected reward or reward/digits or"),
    ({"path": f"{__name__}:SumsInPictures"}, NO_SYSTEM, {},
     r"prompt\(1\): image 2 of 2: 50 bytes that cannot be decoded"),
    ({"path": f"{__name__}:SumsInPictures"}, NO_SYSTEM, {"teacher.url": "http://h:1/v1"},
     r"prompt\(1\) has images, which teacher.url = 'http://h:1/v1' is not sent; expected teacher.model"),
    ({"path": f"{__name__}:SumsInPictures"}, NO_SYSTEM, {"model.reference": "."},
     r"prompt\(1\) has images, and model.reference = '\.' has no image processor; expected a model that sees"),
    ({"path": f"{__name__}:SumsByHash"}, None, {},
     r"SumsByHash': prompt\(1\) differs between processes, .*=, or in its .* \(.*checks.py:\d+\)$"),
    ({"path": f"{__name__}:SumsOfOneProcess", "kwargs": {"first": os.getpid()}}, None, {},
     r"a second process cannot pose the tasks that this one poses: .*OSError: port 8000 is taken \(.*checks.py:\d+"),
    ({"path": f"{__name__}:SumsOfWords"}, None, {},
     r"prompt\(1\): its reward: 'right' for completion '2', expected a finite number .* \(.*checks.py:\d+\)$"),
)
# fmt: on


def test_what_would_let_every_group_die_is_found_before_a_start(model_folder, tmp_path):
    (model_folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    tokenizer = build_tokenizer(64)
    for environment, template, changes, said in REFUSED:
        tokenizer.chat_template = template
        (model_folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(model_folder)
        for start in (running.check, running.run):
            with pytest.raises(ConfigError, match=said):
                asked = settings(model_folder, **environment)
                pytest.fail(f"{said}: {start(asked, set=changes, runs=tmp_path / 'runs')}")
    assert not (tmp_path / "runs").exists(), "a run is refused before anything is started or written"


def test_variables_of_the_chat_template_reach_every_prompt_and_one_that_it_does_not_read_is_warned_of(
    model_folder, capsys
):
    build_tokenizer(64, chat_template=THINKS).save_pretrained(model_folder)
    asked = settings(model_folder, kwargs={"roles": ["user"]})
    good = {"checkpoint.best": "reward/exact", "evaluation.goal": {"figure": "reward/digits", "value": 1}}
    plain = running.check(asked, set=good)
    assert "warning" not in capsys.readouterr().err
    off = running.check(
        asked, set={"model.chat_template_kwargs.enable_thinking": False, "model.chat_template_kwargs.budget": 1}
    )
    assert capsys.readouterr().err.count("chat_template_kwargs") == 1
    prompt = SumsInRoles(seed=0, roles=("user",)).prompt(1)
    texts = []
    for config in (plain, off):
        tokenizer = load_tokenizer(config)
        texts.append(tokenizer.decode(tokenize(tokenizer, prompt)))
    assert texts == ["1+1=", "1+1=0"]
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=True) == "1+1=", (
        "a request's own wins"
    )
    template = "{# budget #}{% set depth = 1 %}{{ depth }}" + THINKS
    build_tokenizer(64, chat_template=template).save_pretrained(model_folder)
    names = ("enable_thinking", "thinking", "budget", "depth", "m")
    running.check(asked, set={f"model.chat_template_kwargs.{name}": 1 for name in names})
    said = capsys.readouterr().err
    assert [f"chat_template_kwargs.{name}: " in said for name in names] == [False, True, True, True, True]
    with pytest.raises(ConfigError, match=r"model.chat_template_kwargs.tokenize: Penstock sets it"):
        running.check(asked, set={"model.chat_template_kwargs.tokenize": True})


def test_a_part_that_the_reward_of_a_conversing_environment_has_is_known_and_no_other_one(model_folder, capsys):
    build_tokenizer(64, chat_template=THINKS).save_pretrained(model_folder)
    asked = settings(model_folder, path="penstock.producers.environments.calculator:Calculator")
    for part, is_known in (("exact", True), ("called", False)):
        goal = {"evaluation.goal": {"figure": f"reward/{part}", "value": 1}}
        running.check(asked, set={"endpoint.port": 0} | goal)
        assert ("whether the reward has this part is not known" in capsys.readouterr().err) != is_known, part


def test_a_message_that_the_chat_template_leaves_out_is_warned_of(model_folder, capsys):
    build_tokenizer(
        64, chat_template=NO_SYSTEM.replace("{{ raise_exception('System role not supported') }}", "{% continue %}")
    ).save_pretrained(model_folder)
    for roles, is_left_out in ((["user"], False), (["system", "user"], True)):
        running.check(settings(model_folder, kwargs={"roles": roles}))
        said = "prompt(1): messages[0].content of the role 'system' is left out by the model's chat template"
        assert (said in capsys.readouterr().err) == is_left_out
