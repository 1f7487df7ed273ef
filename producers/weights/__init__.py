"""New weights on their way into the engine: `follower.WeightFollower`."""
