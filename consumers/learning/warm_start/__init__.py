"""The warm start: `steps.warm_steps` takes optimizer steps on what `demonstrations.read_demonstrations` reads."""
