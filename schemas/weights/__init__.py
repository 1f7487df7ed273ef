"""The weight log: what a trainer writes for each policy, and how its weights are read back.

Import `layout`, which places tensors in a file; `codec`, which encodes changed elements as chunks; `stores`, which keep
chunks; `log`, which finds the manifests that lead from one version to another; and `reading`, which fetches and checks
chunks.
"""
