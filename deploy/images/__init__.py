"""The container images of producers and trainer, and what is installed in them."""
