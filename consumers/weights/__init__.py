"""Publication of the policy: chunks of what has changed into a store, then a manifest on the policy stream.

Imported through `published_policy.PublishedPolicy`, which numbers the versions; `publisher.Publisher`, which has them
written and announces them; `best.BestPolicy`, which keeps the best evaluated one; `shard.PolicyShard`, a rank's part of
them; and `shard_publisher.ShardPublisher`, for the other ranks.
"""
