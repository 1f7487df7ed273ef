"""Engines that sample rollouts; the only place that imports vLLM.

`vllm.VllmEngine` is the engine and `answer_parser.VllmAnswerParser` parses its answers. `settings` and `weight_files`
need no vLLM: the checks before a start and the parity check use them. `weight_transfer` is loaded in vLLM's
processes.
"""
