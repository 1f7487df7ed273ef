"""The trainer's model: masters in float32, packed attention, the float32 head, the optimizer, and their files.

`loading` opens a model, `packed_model.PackedModel` runs a batch's rows with `attention` on its `device`, `vision` shows
it their images, `head` (with `head_kernels`) gives their logprobs, and `model_check` tests all three at the start.
`lora` has adapters, `optimizer` makes the optimizer, `schedule` has its learning rate; `shards` divides the parameters
among ranks, `expert_ranks` the experts, `published.PublishedPart` refers to what is published, `rounding` makes it
follow the masters. `learner_state` and `tensor_files` write checkpoints, `export` makes Hugging Face folders of them.
"""
