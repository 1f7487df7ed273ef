"""OpenAI's chat completions as the endpoint speaks them: `requests`, `bodies`, `answers`, `messages` and `errors`; its
Responses API as a translation onto them: `responses`; and the events of both: `streams`."""
