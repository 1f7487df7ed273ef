"""The study: what lag costs, and what each correction saves of it, on the demo's model and task (`make study`)."""
