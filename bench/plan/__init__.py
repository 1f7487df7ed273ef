"""The forecasts of `penstock plan` against recorded runs: real processes and streams around engines that sleep."""
