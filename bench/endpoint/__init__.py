"""What agents' calls cost beside vLLM's own server."""
