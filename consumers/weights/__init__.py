"""Publication of the policy: a file in the shared folder, then a manifest on the policy stream.

Imported through `published_policy.PublishedPolicy`, which numbers the versions, and `publisher.Publisher`, which writes
them.
"""
