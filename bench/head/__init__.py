"""The float32 head, measured against the naive way and against other libraries' heads."""
