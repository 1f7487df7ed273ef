"""What streaming, updating in flight and asynchrony cost and bring, beside vLLM alone and synchronous runs."""
