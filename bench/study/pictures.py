"""The page's pictures of the formulas, drawn from the functions that the trainer calls."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.drawing import save_all
from penstock.consumers.learning.importance import correct_packed, trust
from penstock.deploy.report import drawing
from penstock.schemas.config import CorrectionConfig

TRUST, WEIGHTS = "corrections-trust.svg", "corrections-weights.svg"
LAGS_SHOWN = (0, 1, 4, 16)
SCHEDULES = (
    ("const", CorrectionConfig("token_truncate"), drawing.MUTED),
    ("power, lag_power 0.5", CorrectionConfig("token_truncate", schedule="power"), drawing.BLUE),
    ("power, lag_power 1", CorrectionConfig("token_truncate", schedule="power", lag_power=1.0), drawing.TEAL),
    ("exponential, lag_decay 0.8", CorrectionConfig("token_truncate", schedule="exponential"), drawing.AMBER),
    ("max_lag, max_lag 8", CorrectionConfig("token_truncate", schedule="max_lag", max_lag=8), drawing.VIOLET),
)
MODES = (
    ("token_truncate, const", CorrectionConfig("token_truncate")),
    ("token_truncate, power", CorrectionConfig("token_truncate", schedule="power")),
    ("token_mask, power, lower 0.5", CorrectionConfig("token_mask", schedule="power", lower=0.5)),
)
LOG_RATIOS = np.linspace(-1.2, 1.2, 961)


def draw_pictures(folder: Path) -> list[Path]:
    """Writes both pictures into `folder` and returns their files."""
    return save_all({folder / TRUST: _trust_figure, folder / WEIGHTS: _weights_figure})


def trust_curve(config: CorrectionConfig, lags: np.ndarray) -> np.ndarray:
    """Returns tau(d) of integer lags [n]; NaN beyond `max_lag`, where nothing is trusted."""
    tau = trust(torch.as_tensor(lags), config).numpy().copy()
    if config.max_lag is not None:
        tau[lags > config.max_lag] = np.nan
    return tau


def weight_curve(config: CorrectionConfig, log_ratios: np.ndarray, lag: int) -> np.ndarray:
    """Returns the weight of tokens with these log-ratios [n], all of one lag."""
    proximal = torch.as_tensor(log_ratios)
    everything = torch.ones(len(log_ratios), dtype=torch.bool)
    return correct_packed(
        proximal,
        torch.zeros_like(proximal),
        everything,
        torch.full((len(log_ratios),), lag),
        torch.zeros(len(log_ratios), dtype=torch.int64),
        config,
    ).weights.numpy()


def _trust_figure() -> Figure:
    figure = Figure(figsize=(7.6, 3.3), layout="constrained")
    ax = figure.add_subplot()
    lags = np.arange(0, 17)
    for label, config, colour in SCHEDULES:
        tau = trust_curve(config, lags)
        # max_lag lies on const as far as it goes.
        style = "--" if config.max_lag is not None else "-"
        ax.plot(lags, tau, color=colour, label=label, linestyle=style, marker="o", markersize=3)
        if config.max_lag is not None:
            ax.plot(config.max_lag, tau[config.max_lag], "x", color=colour, markersize=9)
    ax.set_ylim(0.95, 2.08)
    ax.set_xlabel("lag d, optimizer steps")
    ax.set_ylabel("largest weight τ(d)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _weights_figure() -> Figure:
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(MODES), sharey=True))
    shades = [drawing.LAG_SHADES[n] for n in (1, 3, 4, 6)]
    for ax, (label, config) in zip(panels, MODES, strict=True):
        ax.set_title(label)
        ax.plot(
            LOG_RATIOS, np.exp(LOG_RATIOS), color=drawing.RULE, linewidth=1, linestyle=":", label="the ratio itself"
        )
        for lag, shade in zip(LAGS_SHOWN, shades, strict=True):
            # The oldest below, so that where the lines agree the youngest is seen.
            ax.plot(
                LOG_RATIOS,
                weight_curve(config, LOG_RATIOS, lag),
                color=shade,
                label=f"lag {lag}",
                zorder=3 - LAGS_SHOWN.index(lag) / 10,
            )
        ax.set_xlabel("proximal - behavior, log-ratio")
        ax.set_ylim(-0.06, 2.6)
    panels[0].set_ylabel("weight")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
