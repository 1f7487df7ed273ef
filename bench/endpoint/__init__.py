"""Agents' calls at a producer's endpoint, measured against vLLM's own server."""
