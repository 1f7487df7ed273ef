"""The parts that every process of a run needs and that are no contract.

`logs`, `prometheus` and `json_lines` report; `redis_url` finds Redis, `outage` lives through its outages and `clock`
compares this host's time with its; `plugins` resolves the user's own code; `files` replaces files whole, `ports` finds
a free port, `cancellation` cancels asyncio tasks.
"""
