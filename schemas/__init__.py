"""The contract between producers and consumers: record types, wire format, names. Standard library and msgspec only."""
