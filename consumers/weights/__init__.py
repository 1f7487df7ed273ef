"""Publication of the policy: chunks with its changes into a store, then a manifest on the policy stream.

Imported through `published_policy.PublishedPolicy`, which numbers the versions; `publisher.Publisher`, which has them
written and announces them; `writer.WeightPlaces`, where chunks are put; `best.BestPolicy`, which keeps the best
evaluated one; `shard.PolicyShard`, one rank's part; and `shard.ShardPublisher`, for the ranks other than the lead.
"""
