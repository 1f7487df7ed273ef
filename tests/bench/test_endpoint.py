"""The endpoint section runs, holds the same conversations at both servers, and sets its figures beside their goals."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from bench.__main__ import RUN_FILE
from bench.endpoint import servers
from bench.endpoint.chat_model import TEXT, Topics, chat_tokenizer
from bench.endpoint.encoding import EncodingSettings, encoding_figures
from bench.endpoint.gateway import (
    GatewayReading,
    GatewaySettings,
    Pair,
    SideBySide,
    gateway_config,
    history_turns,
    processor_figure,
    time_figure,
)
from bench.endpoint.section import ENDPOINT, QUICK_ENDPOINT
from bench.endpoint.servers import Answer, ChatServer, PenstockServer, VllmServer, serve_arguments
from bench.result import BenchError, Goal
from bench.section import measure
from penstock.deploy.launch.child import Child
from real_server import free_port
from waiting import wait_for

TINY = EncodingSettings(calls=6, turn_tokens=60, answer_tokens=30)


def answer(seconds: float, num_sampled: int = 4) -> Answer:
    return Answer(seconds, {"role": "assistant", "content": "yes"}, 2000, num_sampled)


def held(*pairs: tuple[Answer, Answer], processor_s: float = 0.3, reference_processor_s: float = 0.2) -> GatewayReading:
    return GatewayReading(
        pairs=tuple(Pair(ours=ours, theirs=theirs) for ours, theirs in pairs),
        processor_s=processor_s,
        reference_processor_s=reference_processor_s,
    )


class PlayedServer(ChatServer):
    """Notes every call in a list that it shares with the other server. Each call costs a processor second."""

    def __init__(self, name: str, log: list[tuple[str, list[dict[str, str]]]]) -> None:
        super().__init__(name, 0, 0)
        self._log = log
        self.finished: list[str] = []
        self._num_calls = 0

    def chat(self, path: str, request: dict[str, Any]) -> Answer:
        self._num_calls += 1
        self._log.append((self.name, [dict(message) for message in request["messages"]]))
        message = {"role": "assistant", "content": f"{self.name} {self._num_calls}", "prompt_token_ids": [1, 2]}
        return Answer(0.5, message, 10 * len(request["messages"]), 4)

    def finish(self, path: str) -> None:
        self.finished.append(path)

    def processor_s(self) -> float:
        return float(self._num_calls)


@pytest.fixture(scope="module")
def topics() -> Topics:
    return Topics(chat_tokenizer(4096))


@pytest.fixture
def http_server() -> Iterator[ThreadingHTTPServer]:
    """Answers a chat with what it was sent, and everything else with an error."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
            asked = json.loads(sent)["messages"][-1]["content"] if sent else ""
            found = {
                "choices": [{"message": {"role": "assistant", "content": asked, "prompt_token_ids": [1, 2]}}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            }
            self._answer(200 if "chat" in self.path else 418, json.dumps(found).encode())

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 418, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_conversation_is_encoded_about_once():
    tokens, seconds = encoding_figures(TINY)
    assert tokens.name == "tokens encoded in a conversation of 6 calls" and str(tokens.goal) == "≤ 2"
    assert tokens.reached and tokens.reference == pytest.approx(6 * (60 + 30), rel=0.2)
    # Every token but those of the last answer has to be encoded at least once.
    assert tokens.reference - 40 <= tokens.measured < tokens.details["num_encoded_whole"] / 2
    assert seconds.measured and seconds.reference and seconds.goal is None


def test_encoding_everything_at_each_call_would_miss_the_goal(monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    tokens, _ = encoding_figures(TINY)
    assert tokens.reached is False and tokens.measured >= tokens.details["num_encoded_whole"]


def test_turns_have_the_length_asked_for_and_never_run_out(topics):
    tokenizer = chat_tokenizer(4096)
    num_tokens = len(tokenizer(TEXT, verbose=False)["input_ids"])
    turns = [topics.turn(3000) for _ in range(num_tokens // 3000 + 1)]
    assert turns[-1] == turns[0] and len(set(turns)) == len(turns) - 1
    assert all(len(tokenizer(turn)["input_ids"]) == pytest.approx(3000, rel=0.01) for turn in turns)


def test_the_history_comes_to_its_length_in_long_turns():
    assert history_turns(2300) == [983, 983, 283]
    assert history_turns(2010) == [983, 983]
    assert history_turns(-5) == []


def test_both_servers_hold_the_same_conversation_in_turns(topics):
    log: list[tuple[str, list[dict[str, str]]]] = []
    ours, theirs = PlayedServer("ours", log), PlayedServer("theirs", log)
    table = SideBySide(ours, theirs, topics)
    settings = GatewaySettings(calls=4, turn_tokens=50)
    found = table.hold(settings, 1600)
    assert [name for name, _ in log[-8:]] == ["ours", "theirs", "theirs", "ours"] * 2
    assert len(found.pairs) == 4 and (found.processor_s, found.reference_processor_s) == (4.0, 4.0)
    last = dict(log)
    for name, messages in last.items():
        # 1466 tokens of history in two turns, then four calls, each after all that was said before.
        assert [message["role"] for message in messages] == ["user", "assistant"] * 5 + ["user"]
        assert [message["content"] for message in messages[1::2]] == [f"{name} {n}" for n in range(1, 6)]
    asked = [[message["content"] for message in messages[::2]] for messages in last.values()]
    assert asked[0] == asked[1] and asked[0][0].startswith("Conversation 1.\n")
    assert ours.finished == theirs.finished == ["/v1/chat/completions"]
    assert not any("prompt_token_ids" in message for _, messages in log for message in messages)
    table.hold(settings, 1600, sends_ids=True)
    assert log[-1][1][0]["content"].startswith("Conversation 2.\n")
    carried = {name: ["prompt_token_ids" in message for message in messages[1::2]] for name, messages in log[-2:]}
    assert carried == {"ours": [True] * 5, "theirs": [False] * 5}


def test_calls_are_compared_pair_by_pair_where_both_sampled_as_much():
    conversations = [
        held((answer(0.022), answer(0.020)), (answer(0.5), answer(0.01, num_sampled=1))),
        held((answer(0.036), answer(0.030)), (answer(0.020), answer(0.020))),
    ]
    found = time_figure("2,000 tokens", conversations, Goal(at_most=1.1))
    assert (found.measured, found.reference) == (pytest.approx(22.0), pytest.approx(20.0))
    assert found.ratio == pytest.approx(1.1) and str(found.goal) == "≤ 1.1" and found.reached
    assert (found.details["num_pairs"], found.details["num_pairs_left_out"]) == (3, 1)
    assert found.details["ratio_by_round"] == [1.1, 1.1]
    assert time_figure("500 tokens", conversations, None).goal is None
    used = processor_figure("2,000 tokens", conversations)
    assert (used.measured, used.reference) == (pytest.approx(150.0), pytest.approx(100.0)) and used.goal is None


def test_calls_that_cannot_be_compared_are_an_error():
    with pytest.raises(BenchError, match="in none of 1 pairs of calls did both sample equally many tokens"):
        time_figure("2,000 tokens", [held((answer(0.02), answer(0.02, num_sampled=2)))], None)


def test_a_call_is_timed_and_gives_its_answer_back(http_server):
    server = ChatServer("echo", http_server.server_port, 0)
    found = server.chat("/v1/chat/completions", {"messages": [{"role": "user", "content": "héllo"}]})
    assert found.seconds > 0 and found.message["content"] == "héllo" and found.message["prompt_token_ids"] == [1, 2]
    assert (found.num_prompt_tokens, found.num_sampled_tokens) == (7, 3)
    server.close()


def test_errors_of_a_server_carry_its_name(http_server):
    port = http_server.server_port
    vllm, penstock = VllmServer("vllm", port, 0), PenstockServer("penstock", port, 0)
    assert vllm.is_ready()
    with pytest.raises(BenchError, match="penstock: status 418"):
        penstock.open()
    vllm.close()
    penstock.close()
    http_server.shutdown()
    http_server.socket.close()
    gone = VllmServer("vllm", free_port(), 0)
    assert not gone.is_ready()
    with pytest.raises(BenchError, match="vllm: ConnectionRefusedError"):
        gone.chat("/v1/chat/completions", {"messages": []})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_processor_time_is_that_of_the_whole_family(tmp_path):
    busy = "while True: pass"
    idle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child = Child("busy", [sys.executable, "-c", idle], log=tmp_path / "busy.log")
    server = ChatServer("busy", 0, child.pid)
    try:
        wait_for(lambda: server.processor_s() >= 0.5)
        assert child.poll() is None
    finally:
        child.kill()
        wait_for(lambda: child.poll() is not None)
    wait_for(lambda: server.processor_s() == 0.0)


def test_a_server_that_dies_is_named_with_its_log(tmp_path):
    child = Child("vllm", [sys.executable, "-c", "raise SystemExit('no such model')"], log=tmp_path / "vllm.log")
    with pytest.raises(BenchError, match=r"(?s)vllm ended with status 1; its log ends:.*no such model"):
        servers.wait_until_ready([child], lambda: False)


def test_vllms_server_gets_the_settings_of_the_producers_engine(tmp_path):
    arguments = serve_arguments(gateway_config(tmp_path, 4096), 8123)
    given = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    assert given["--model"] == str(tmp_path) and given["--port"] == "8123" and given["--max-model-len"] == "4096"
    assert given["--dtype"] == "float32" and json.loads(given["--hf-overrides"]) == {"head_dtype": "float32"}
    assert "--enable-prefix-caching" in given and "--no-async-scheduling" in given
    assert not {"--weight-transfer-config", "--worker-extension-cls"} & set(given)


@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_calls_at_both_servers_are_timed(tmp_path):
    gateway = GatewaySettings(contexts=(400,), rounds=1, calls=2, turn_tokens=50)
    settings = msgspec.structs.replace(QUICK_ENDPOINT, gateway=gateway)
    result = measure(ENDPOINT, ["gateway"], settings, RUN_FILE, tmp_path)
    time_per_call, _, time_with_ids, _ = result.figures
    assert time_with_ids.name == f"{time_per_call.name}, ids sent back"
    for figure in result.figures:
        assert figure.reference_is and figure.measured and figure.reference and figure.ratio, figure
    details = time_per_call.details
    assert details["num_pairs"] + details["num_pairs_left_out"] == 2
    assert details["prompt_tokens_mean"] == pytest.approx(400, rel=0.1)
    assert details["prompt_tokens_mean"] == pytest.approx(details["reference_prompt_tokens_mean"], rel=0.05)
    assert not list(tmp_path.iterdir())
