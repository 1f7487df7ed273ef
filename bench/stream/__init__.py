"""What crossing Redis costs: appending, reading, memory, reliability."""
