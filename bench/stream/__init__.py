"""The cost of crossing Redis: appending, reading, memory, reliability."""
