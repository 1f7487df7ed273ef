"""The token-exact splice: a conversation's next prompt begins with the very tokens that the model saw and sampled.

`turn_boundary` finds out how a chat template separates turns, `token_ids` splices, `suffix_encoding` encodes only
what a conversation has gained, and `vocabulary` knows the text of single tokens. Used by the endpoint alone.
"""
