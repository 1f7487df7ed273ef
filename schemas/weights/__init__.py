"""The weight log: what a trainer writes of each policy, and how anybody gets its weights back from it.

Imported through `layout`, which places tensors in a file; `codec`, which makes chunks of what has changed; `stores`,
where chunks are kept; `log`, which says which manifests lead from one version to another; and `reading`, which fetches
and checks them.
"""
