"""An optimizer by its import path."""

import re
import sys

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.optimizer import make_optimizer
from penstock.schemas.config import ConfigError, Plug, TrainerConfig
from training_groups import configuration, lag_from, random_groups, tiny_model, weights_of


class CountsInIntegers(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1


def of_the_first(parameters, lr):
    return torch.optim.SGD(parameters[:1], lr=lr)


def nothing(parameters, lr):
    return None


def trainer(path: str, **kwargs) -> TrainerConfig:
    return TrainerConfig(device="cpu", learning_rate=0.1, optimizer=Plug(path=path, kwargs=kwargs))


def test_a_step_is_that_of_the_optimizer_named_at_the_trainer_s_learning_rate(folder):
    learner = Learner(configuration(folder, trainer=trainer("torch.optim:SGD", momentum=0.9)))
    before, gradients = weights_of(learner), {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.update((name, p.grad.clone()) for name, p in learner.model.module.named_parameters())
    )
    learner.step(learner.pack(random_groups(3, 1), lag_from(7)))
    assert gradients
    for name, tensor in weights_of(learner).items():
        torch.testing.assert_close(tensor, before[name] - 0.1 * gradients[name])


def test_weight_decay_acts_on_matrices_as_transformers_has_it_and_spares_norms_and_biases(tmp_path):
    tiny_model(tmp_path, attention_bias=True)
    runs = []
    for weight_decay in (0.0, 0.5):
        trainer = TrainerConfig(device="cpu", learning_rate=0.1, weight_decay=weight_decay)
        learner = Learner(configuration(tmp_path, trainer=trainer))
        before = weights_of(learner)
        learner.step(learner.pack(random_groups(3, 1), lag_from(7)))
        runs.append(weights_of(learner))
    # Trainer's rule: everything but what is in a norm or is named a bias.
    decayed = set(get_parameter_names(learner.model.module, [type(learner.model.module.model.norm)], ["bias"]))
    assert "model.layers.0.mlp.up_proj.weight" in decayed
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} < before.keys() - decayed
    plain, with_decay = runs
    for name, tensor in before.items():
        shrunk = 0.1 * 0.5 * tensor if name in decayed else torch.zeros(())
        torch.testing.assert_close(with_decay[name], plain[name] - shrunk, msg=name)


REFUSED = (
    ("torch.optim:Sgd", {}, "trainer.optimizer.path = 'torch.optim:Sgd': module 'torch.optim' has no 'Sgd'"),
    ("nowhere:SGD", {}, "trainer.optimizer.path = 'nowhere:SGD': cannot import 'nowhere'"),
    ("torch.optim:SGD", {"beta": 1}, "trainer.optimizer: torch.optim:SGD with lr and kwargs = {'beta': 1}: "),
    ("torch.optim:SGD", {"momentum": -1}, "Invalid momentum value: -1"),
    ("test_optimizer:nothing", {}, "makes a NoneType, expected a torch.optim.Optimizer"),
    ("torch.optim:LBFGS", {}, "cannot take a step: "),
    ("torch.optim:Adafactor", {}, "'row_var' of a parameter of [4, 6] is a tensor of [4, 1]; expected tensors"),
    ("test_optimizer:CountsInIntegers", {}, "its state 'count' of a parameter of [4, 6] is 1; expected tensors"),
    ("test_optimizer:of_the_first", {}, "holds 1 of the 3 parameters"),
)


def test_an_optimizer_that_does_not_fit_is_refused_with_what_was_expected(monkeypatch):
    monkeypatch.setitem(sys.modules, "test_optimizer", sys.modules[__name__])
    for path, kwargs, message in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_optimizer(trainer(path, **kwargs), [nn.Parameter(torch.zeros(3)) for _ in range(3)])
    with pytest.raises(ValueError, match=r"weight_decay = 0.1 with optimizer.path = 'torch.optim:SGD': it is AdamW's"):
        TrainerConfig(weight_decay=0.1, optimizer=Plug(path="torch.optim:SGD"))
