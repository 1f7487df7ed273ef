"""What `penstock plan` says of runs against what they came to: real processes and streams around engines that sleep."""
