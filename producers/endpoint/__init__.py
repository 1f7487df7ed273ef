"""The HTTP endpoint for agents: every call is answered by the engine, and what an agent finishes becomes a rollout.

Imported through `server.AgentEndpoint` and `access.api_key`; an evaluation without a run uses `calls.Calls` and
`inside.Conversations`. A call passes `server` (HTTP), `calls` (rendered, sampled, parsed) and `call_ledger` (what the
server knows of a rollout); a streamed answer leaves by `event_stream` while it is sampled. `agents` and `groups` make
groups of what is finished, `inside` runs environments that hold their conversations themselves. What a rollout enters
in its journal is in `recording`, how another producer takes it over in `adoption`, and how requests find their rollout
and the producer that has it in `holders`. `spans` says what its calls and tools took.
"""
