"""The study: the cost of lag, and how much of it each correction saves, on the demo's model and task (`make study`)."""
