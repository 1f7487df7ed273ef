"""Who may do what on a Redis that is shared: ACL users for the parts of a run."""
