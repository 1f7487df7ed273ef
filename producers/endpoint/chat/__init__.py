"""OpenAI's chat completions as the endpoint speaks them: `requests`, `answers`, `messages` and `errors`; and its
Responses API as a translation onto them: `responses`."""
