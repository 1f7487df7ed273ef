"""OpenAI's chat completions as the endpoint speaks them: `requests`, `bodies`, `answers`, `messages` and `errors`; its
Responses API and Anthropic's Messages API as translations onto them: `responses` and `anthropic`; the events of all:
`streams`; and what the server needs to know of each: `dialects`."""
