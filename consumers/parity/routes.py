"""What replaying a mixture's routes is worth: the gap without it, and the share of other choices by layer."""

import torch

from penstock.consumers.parity.replay import Replay, as_labelled
from penstock.consumers.parity.verdict import gap_of


def route_note(replay: Replay) -> str | None:
    """Returns a line for the report, by two passes over the sample; None for a model whose routes are not replayed."""
    sample = replay.sample
    routing = replay.policies.model(int(sample.versions[0])).routing
    if routing is None:
        return None
    with routing.compared() as differing:
        replay.logprobs(as_labelled(row) for row in sample.rows)
    with routing.freed():
        free = replay.logprobs(as_labelled(row) for row in sample.rows)
    shares = {layer: float(torch.cat(found).float().mean()) for layer, found in sorted(differing.items())}
    shown = ", ".join(f"{layer}: {share:.2%}" for layer, share in shares.items())
    return (
        f"by its own routers the trainer is {gap_of(sample.engine, free).mean:.1e} nats off; tokens for which these "
        f"choose other experts than the engine did, by layer: {shown}"
    )
