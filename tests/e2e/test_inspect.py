"""`penstock inspect` on a real run: its record, while it trains and afterwards."""

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from monitored_run import GROUPS_PER_BATCH, MonitoredRun
from penstock.schemas.record import sampled_tokens
from penstock.schemas.record_reader import Record

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def inspected(run: MonitoredRun) -> Iterator[str]:
    """Runs the inspector and yields its URL; it must end cleanly."""
    command = run.command("inspect", run.name, "--port", "0")
    with subprocess.Popen(command, cwd=run.project, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(line for line in process.stdout if line.startswith("http")).split()[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()


def ask(url: str, path: str) -> Any:
    """Returns the decoded answer to a GET request."""
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_a_live_run_is_followed(live_run: MonitoredRun) -> None:
    with inspected(live_run) as url:
        first = ask(url, "/api/run")
        live_run.wait_for(lambda: ask(url, "/api/run")["num_groups"] > first["num_groups"])
        row = ask(url, "/api/groups?size=1")["rows"][0]
        group = ask(url, f"/api/groups/{row['key']}")
    segment = group["rollouts"][0]["segments"][0]
    context = "".join(segment["texts"])[: segment["positions"][0]]
    assert context == group["prompt"]["text"] and len(group["rollouts"]) == 8
    assert all(version >= 0 for version in segment["versions"])


def test_the_record_of_a_real_run_is_shown_as_it_is(ended_run: MonitoredRun) -> None:
    record = Record(ended_run.folder)
    at = max(record.groups(), key=lambda at: (at.entry.outcome == "trained", at.entry.max_lag))
    recorded = record.group(at)
    group = recorded.decode()
    with inspected(ended_run) as url:
        head = ask(url, "/api/run")
        num_groups = GROUPS_PER_BATCH * len(ended_run.updates())
        assert (head["num_groups"], head["notes"]) == (num_groups, [])
        shown = ask(url, f"/api/groups/0-{at.batch.position}-{at.place}")
        stale = ask(url, f"/api/groups?outcome=trained&lag_min={at.entry.max_lag}&size=200")
    assert shown["index"] == group.index and shown["answer"] == group.prompt.answer
    assert {row["lags"][1] for row in stale["rows"]} == {at.entry.max_lag}
    for r, rollout in enumerate(shown["rollouts"]):
        (segment,) = rollout["segments"]
        tokens = sampled_tokens(group.rollouts[r].segments[0], recorded.findings[r][0])
        assert "".join(segment["texts"]).startswith(group.prompt.text or "")
        assert segment["lags"] == [token.lag for token in tokens]
        assert segment["kept"] == [token.is_kept for token in tokens]
        assert segment["proximal_logprobs"] == [token.proximal_logprob for token in tokens]
