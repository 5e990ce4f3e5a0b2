"""Moving KV blocks between engines over TCP: hold, pull, verify, release."""
