"""An engine, environments, and the loop that turns prompts into rollouts on the stream."""
