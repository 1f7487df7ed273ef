"""Brings new weights into the engine. Imported through `follower.WeightFollower`, which follows the policy stream;
`host_copy.HostCopy`, the copy that the producers of one host share; and `host_folder`, which finds room for it."""
