"""New weights on their way into the engine. Imported through `follower.WeightFollower`."""
