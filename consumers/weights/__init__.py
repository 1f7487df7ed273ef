"""Publication of the policy: chunks with its changes into a store, then a manifest on the policy stream.

Imported through `published_policy.PublishedPolicy`, which numbers the versions; `publisher.Publisher`, which has them
written and announces them; `writer.WeightPlaces`, where chunks are put; `best.BestPolicy`, which keeps the best
evaluated one; `shard.open_shard`, which opens one rank's part, from which the learner reads older policies; and
`shard.ShardPublisher`, for the ranks other than the lead.
"""
