"""Answers that the last batch was trained on, with their prompts and the images in these, from the record."""

import html
import io
from collections.abc import Iterator
from pathlib import Path

from penstock.deploy.report.tokens import TokenTexts, texts_of_run
from penstock.schemas.config import RunConfig
from penstock.schemas.images import data_url
from penstock.schemas.process.image_files import decoded
from penstock.schemas.prompt import ImagePart, Message, Prompt
from penstock.schemas.record import GroupEntry, RecordReadError
from penstock.schemas.record_reader import GroupAt, Record
from penstock.schemas.rollout import Rollout, RolloutGroup, unpack_ids

NUM_GROUPS = 3
MOST_CHARACTERS = 1_000
"""Of a prompt and of an answer."""
_SIDE = 256
"""Pixels to which an image is scaled down."""


def examples(run_folder: Path, config: RunConfig | None) -> str:
    """Renders the best and the worst answer of the groups whose rewards differ most; "" without a record, or with a
    batch of none that was trained."""
    try:
        record = Record(run_folder)
        if not record.batches:
            return ""
        batch = record.batches[-1]
        head = record.head(batch)
        entries = [(place, each) for place, each in enumerate(head.groups) if each.outcome == "trained"]
        chosen = sorted(entries, key=lambda placed: -_spread(placed[1]))[:NUM_GROUPS]
        groups = [record.group(GroupAt(batch, head, place)).decode() for place, _ in chosen]
    except RecordReadError:
        return ""
    if not groups:
        return ""
    texts, problem = texts_of_run(config)
    parts = [f"<p>{html.escape(problem)}</p>" if problem else "", *(_group(group, texts) for group in groups)]
    return f"<details><summary>Answers of update {batch.update}</summary>{''.join(parts)}</details>"


def _spread(entry: GroupEntry) -> float:
    return max(entry.rewards) - min(entry.rewards)


def _group(group: RolloutGroup, texts: TokenTexts | None) -> str:
    by_reward = sorted(group.rollouts, key=lambda rollout: -rollout.reward.value)
    shown = by_reward if len(by_reward) < 2 else [by_reward[0], by_reward[-1]]
    rows = "".join(
        f"<tr><td>reward {each.reward.value:.3g}</td><td><pre>{_cut(_answer(each, texts))}</pre></td></tr>"
        for each in shown
    )
    prompt = "".join(_prompt(group.prompt, group.images or {}))
    return f"<h2>Group {group.index:,}</h2>{prompt}<table>{rows}</table>"


def _answer(rollout: Rollout, texts: TokenTexts | None) -> str:
    """Returns what the model said, turn by turn."""
    turns = []
    for segment in rollout.segments:
        ids = unpack_ids(segment.token_ids)
        for start, end in segment.loss_mask:
            own = ids[start:end].tolist()
            turns.append(" ".join(map(str, own)) if texts is None else "".join(each.text for each in texts.texts(own)))
    return "\n".join(turns)


def _prompt(prompt: Prompt, images: dict[str, bytes]) -> Iterator[str]:
    if prompt.messages is None:
        yield f"<pre>{_cut(prompt.text or '')}</pre>"
    for message in prompt.messages or ():
        yield f"<pre>{html.escape(message.role)}: {_cut(message.text)}</pre>"
        yield from _images(message, images)


def _images(message: Message, images: dict[str, bytes]) -> Iterator[str]:
    for part in message.content if isinstance(message.content, tuple) else ():
        if isinstance(part, ImagePart) and (file := images.get(part.digest)):
            small = decoded(file)
            small.thumbnail((_SIDE, _SIDE))
            drawn = io.BytesIO()
            small.save(drawn, format="PNG")
            yield f'<img alt="image {part.digest[:12]}" src="{data_url(drawn.getvalue())}">'


def _cut(text: str) -> str:
    return html.escape(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…")
