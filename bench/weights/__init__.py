"""The weights section: policies from the trainer's memory to the engines of other processes."""
