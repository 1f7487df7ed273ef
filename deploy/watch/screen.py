"""One picture of a run: a head, and one of the three views or all of them."""

from penstock.deploy.watch.flow import flow
from penstock.deploy.watch.learning import learning
from penstock.deploy.watch.off_policy import off_policy
from penstock.deploy.watch.snapshot import RunSnapshot
from penstock.deploy.watch.text import duration, joined, moment
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

VIEWS = {"Flow": flow, "Learning": learning, "Off-policy": off_policy}


def head(seen: RunSnapshot) -> Text:
    newest = seen.newest
    planned = f"/{seen.config.num_updates}" if seen.config is not None else ""
    words: list[Text | str] = [Text(seen.name, style="bold"), f"update {newest.update if newest else 0}{planned}"]
    when = f"{moment(newest.time_s)}, {duration(seen.time_s - newest.time_s)} ago" if newest is not None else ""
    if seen.is_over:
        words.append(Text(f"over: finished {when}", style="green"))
    elif not seen.is_running:
        state = f"not running; last update {when}" if newest is not None else "not running; no update yet"
        words.append(Text(state, style="yellow"))
    else:
        rate = seen.updates_per_s
        if rate is not None and seen.config is not None and newest is not None:
            words.append(f"{duration((seen.config.num_updates - newest.update) / rate)} left")
        words.append(Text(moment(seen.time_s), style="dim"))
    return joined(words)


def one_view(seen: RunSnapshot, number: int, width: int) -> RenderableType:
    """View 1, 2 or 3 with the keys that lead to the others."""
    tabs = Text()
    for place, name in enumerate(VIEWS, start=1):
        tabs.append(f" {place} {name} ", style="reverse bold" if place == number else "dim")
    tabs.append("   q quits", style="dim")
    return Group(head(seen), tabs, Text(), list(VIEWS.values())[number - 1](seen, width))


def all_views(seen: RunSnapshot, width: int) -> RenderableType:
    parts: list[RenderableType] = [head(seen)]
    for name, view in VIEWS.items():
        parts += [Rule(name, align="left", style="dim"), view(seen, width)]
    return Group(*parts)
