"""Engines that sample rollouts; the only place that imports vLLM.

`vllm.VllmEngine` is the engine and `answer_parser.VllmAnswerParser` its parser of answers. `weight_transfer` is loaded
inside vLLM's processes.
"""
