"""The trainer by itself: ranks against one process, their memory and numbers, and TRL on answers of uneven length."""
