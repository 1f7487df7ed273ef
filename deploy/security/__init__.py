"""ACL users of a shared Redis, one for each part of a run. Imported through `acl`."""
