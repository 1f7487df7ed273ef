"""The float32 head beside the naive way and beside other people's heads."""
