"""Streaming, in-flight updates and asynchrony, measured against vLLM alone and against synchronous runs."""
