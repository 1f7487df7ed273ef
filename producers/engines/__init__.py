"""Engines that sample rollouts. The only place that imports vLLM."""
