"""OpenAI's chat completions as the endpoint speaks them: `requests`, `answers`, `messages` and `errors`."""
