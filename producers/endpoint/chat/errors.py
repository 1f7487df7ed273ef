"""Errors as an OpenAI client reads them: `{"error": {"message", "type", "param", "code"}}` under an HTTP status."""

from collections.abc import Mapping
from typing import Any

RETRY_AFTER_S = 2

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """The error response to a request.

    Args:
        code: one word that identifies the error; for programs.
        param: the field of the request that caused it.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def try_again(status: int, message: str, code: str) -> ApiError:
    """Returns an error that tells its client to send the request again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def has_ended(rollout_id: str, reason: str) -> ApiError:
    """Returns a 410. reason: why the rollout died; empty for a finished one."""
    how = f"has ended: {reason}" if reason else "is finished"
    return ApiError(410, f"rollout {rollout_id} {how}", code="rollout_ended")


def is_moving(what: str) -> ApiError:
    """Returns a 503: `what` moves from one producer to another."""
    return try_again(503, f"{what} waits for a producer to continue it", "rollout_moving")


def too_long(max_model_len: int, num_tokens: int | str) -> ApiError:
    """Returns the error of messages beyond the model's context, in the words by which clients of either API know it."""
    return bad_request(
        f"prompt is too long: {num_tokens} tokens > {max_model_len} maximum. "
        f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
        f"{num_tokens} tokens. Please reduce the length of the messages.",
        "messages",
        "context_length_exceeded",
    )


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
