"""The safetensors file of one replayed sequence's hidden states, which an engine writes and the parity check reads.

Tensors, for N tokens, hidden size H and L decoder layers, in the type that the engine computes with unless said
otherwise. The residual stream is the sum that runs through the layers; engines may carry it in two parts, the file
holds the sum::

    token_ids               [N] int64
    layers.<i>.input        [N, H]    the residual stream before layer i; of layer 0, the embedding
    layers.<i>.attention    [N, H]    what the attention of layer i adds to the stream, its own norm included
    layers.<i>.middle       [N, H]    the stream between attention and MLP
    layers.<i>.mlp          [N, H]    what the MLP of layer i adds, its own norm included
    stream                  [N, H]    the stream after the last layer
    norm                    [N, H]    after the final norm
    logprobs                [N - 1]   float32, at temperature 1: log p(token n + 1 | tokens up to n)
    as_served               [H]       `norm` of the last token once more, by the compiled graph that serves requests

The metadata names the layout (`format`), L (`num_layers`) and the version of the weights (`policy_version`).
"""

FORMAT = "penstock.hidden_states.1"

TOKEN_IDS, STREAM, NORM, LOGPROBS, AS_SERVED = "token_ids", "stream", "norm", "logprobs", "as_served"
INPUT, ATTENTION, MIDDLE, MLP = "input", "attention", "middle", "mlp"


def layer(index: int, part: str) -> str:
    """Name of the tensor of a decoder layer; `part` is INPUT, ATTENTION, MIDDLE or MLP."""
    return f"layers.{index}.{part}"
