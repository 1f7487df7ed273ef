"""Parts that every process of a run needs and that are not part of the contract.

`logs`, `prometheus` and `json_lines` report; `redis_url` finds Redis, `outage` handles its outages and
`clock` compares this host's clock with Redis'; `plugins` resolves the user's own code; `files` writes files atomically,
`image_files` decodes images, `ports` finds a free port, `cancellation` cancels asyncio tasks, `stopping` lists the
signals that stop a process.
"""
