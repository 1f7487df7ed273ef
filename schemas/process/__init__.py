"""What every process of a run needs and is no contract: logs, plug-ins, the way to Redis, metrics over HTTP, files."""
